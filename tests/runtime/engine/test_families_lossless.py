"""Every family of heads leaves a request's text unchanged, whichever features the request asks for.

Greedy and sampled text, cached prefixes and speculation that is off are `test_drafter_kinds_lossless`'s; room, loop and
rounds `test_losslessness`'s.
"""

from dataclasses import replace

import pytest

from tests.covering import pairwise
from tests.runtime.drafter_kinds import KINDS
from tests.runtime.models import CHAIN, TREE, Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.small_tokenizers import EOS, metaspace_tokenizer
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.engine.drafter_client import DrafterState
from wingbeat.runtime.llm import connect
from wingbeat.runtime.scheduling.maskers import grammar_compiler
from wingbeat.runtime.scheduling.request import GrammarSpec, Request, SamplingParams

LENGTH = 24
FAMILIES = ["eagle3", "eagle3_latent", "eagle3_layers", "dflash", "jetspec", "dspark", "dflash2", "peagle"]
STAGES = ["answer", "commit", "propose"]
"""Stages of a drafter: all of a round at once where kernels run it; else its keys and values, then its trees."""
ASKED = ["grammar", "logprobs", "prompt logprobs", *(f"killed in {stage}" for stage in STAGES)]
SHAPES = {"chain": CHAIN, "tree": TREE}
AXES = {"family": FAMILIES, "shape": list(SHAPES), "batch": ["8", "1"], "text": ["greedy", "sampled"]}
TOKENIZER = metaspace_tokenizer()


def allowed(row):
    """Whether a row can run: a round of one request ends that request if the drafter in this process dies."""
    return row["batch"] == "8" or not row["asked"].startswith("killed")


def table(asked):
    """Pairwise-covering rows; the first row of each feature runs always, the others are slow."""
    seen, params = set(), []
    for row in pairwise({"asked": asked} | AXES, allowed):
        params.append(
            pytest.param(row, id="-".join(row.values()), marks=pytest.mark.slow if row["asked"] in seen else ())
        )
        seen.add(row["asked"])
    return params


def drafters(tmp_path_factory):
    """Makes the drafter of a row, each family's files once."""
    made = {}

    def drafter(row):
        name = row["family"]
        if name not in made:
            made[name] = KINDS[name](tmp_path_factory.mktemp(name))
        return made[name].drafter(SHAPES[row["shape"]])

    return drafter


def params_of(row, **fields):
    """Eight requests; those with a grammar end where it ends."""
    if row["asked"] == "logprobs":
        fields["logprobs"] = 3
    if row["asked"] == "prompt logprobs":
        fields["prompt_logprobs"] = 2
    if row["asked"] == "grammar":
        specs = [GrammarSpec("regex", "[a-h ]{40,60}"), GrammarSpec("regex", "(ab|cd(e|f)){30}"), None, None] * 2
        base = params_of(row | {"asked": ""}, **fields)
        return [replace(param, grammar=spec) for param, spec in zip(base, specs, strict=True)]
    if row["text"] == "greedy":
        return [greedy_params(LENGTH, **fields)] * 8
    shapes = [(0.7, 1.0), (1.0, 0.9), (1.0, 1.0), (1.3, 0.8)] * 2
    return [
        SamplingParams(LENGTH, temperature, top_p=top_p, seed=seed, ignore_eos=True, **fields)
        for seed, (temperature, top_p) in enumerate(shapes)
    ]


class Asking(Run):
    """Requests with grammars and variants, and all that outputs report."""

    def __init__(self, engine, row, prompts, grammars, variants):
        self.engine, self.tokens, self.last = engine, [[] for _ in prompts], {}
        self.logprobs = [[] for _ in prompts]
        for index, (prompt, param) in enumerate(zip(prompts, params_of(row), strict=True)):
            grammar = None if param.grammar is None else grammars.compile(param.grammar)
            variant = variants[index % len(variants)]
            engine.add_request(Request(str(index), tuple(prompt), param, variant=variant), grammar)

    def step(self):
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            self.logprobs[index] += [*output.logprobs, *output.prompt_logprobs]


def fails_in(drafter, stage, monkeypatch):
    """Make the third call of a stage raise."""
    calls, whole = [], getattr(drafter, stage)

    def failing(*args):
        calls.append(stage)
        if len(calls) == 3:
            raise RuntimeError("killed")
        return whole(*args)

    if stage != "answer":
        monkeypatch.setattr(drafter, "answer", lambda end, outcome: False)
    monkeypatch.setattr(drafter, stage, failing)
    return calls


def run(row, ref, drafter, monkeypatch, variants=(None,), successor=None):
    """Texts of a run and the reports on them."""
    limits = {"max_num_seqs": int(row["batch"])}
    engine = new_engine(ref.loaded, engine_config(SHAPES[row["shape"]], **limits), drafter)
    grammars = grammar_compiler(TOKENIZER, ref.loaded.vocab_size, frozenset({TOKENIZER.encode(EOS)[-1]}))
    stage = row["asked"].removeprefix("killed in ")
    calls = fails_in(drafter, stage, monkeypatch) if successor is not None else []
    asking = Asking(engine, row, ref.prompts, grammars, variants)
    try:
        while successor is not None and engine.drafter_state is DrafterState.ATTACHED:
            assert engine.has_unfinished_requests()
            asking.step()
        if successor is not None:
            assert len(calls) == 3
            asking.step()
            connect(engine, successor, InProcessChannel)
        asking.finish()
        if drafter is not None:
            assert engine.speculation.num_drafts > 0
            assert engine.drafter_state is DrafterState.ATTACHED
    finally:
        engine.model.remove_taps()
    return asking.tokens, asking.logprobs


drafter_of = pytest.fixture(drafters, scope="module")


@pytest.mark.few(4)
@pytest.mark.parametrize("row", table(ASKED))
def test_the_text_is_that_of_plain_decoding(row, drafter_of, monkeypatch):
    check(row, reference("llama"), drafter_of, monkeypatch)


def check(row, world, drafter_of, monkeypatch, variants=(None,)):
    """Check that text and log-probabilities equal those of plain decoding."""
    expected, reported = run(row, world, None, monkeypatch, variants)
    drafter, successor = drafter_of(row), None
    if row["asked"].startswith("killed"):
        successor = drafter_of(row)
    tokens, found = run(row, world, drafter, monkeypatch, variants, successor)
    assert tokens == expected
    for mine, theirs in zip(found, reported, strict=True):
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
        assert [[id for id, _ in one.top] for one in mine] == [[id for id, _ in one.top] for one in theirs]
    if row["asked"] == "grammar":
        texts = [TOKENIZER.decode(text) for text in tokens]
        assert all(set(text) <= set("abcdefgh ") for text in texts[::4] + texts[1::4])
