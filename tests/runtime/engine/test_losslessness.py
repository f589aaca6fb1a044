"""Greedy decoding through the whole engine writes what transformers' generate() writes, token for token."""

from dataclasses import replace
from functools import cache, partial

import pytest

from tests.covering import pairwise
from tests.runtime.drafter_kinds import KINDS, USER_DRAFTER
from tests.runtime.models import (
    CHAIN,
    DEMO_PAIR,
    NUM_TOKENS,
    TREE,
    WINDOW,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    greedy,
    greedy_params,
    reference,
)
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, malform, random_tree, right_chain, right_tree, wrong_tree
from tests.runtime.text_drafters import text_drafter
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig, drawn_tree
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine

MODELS = ["llama", "qwen3", "mistral", "gemma3", "qwen3_moe"]
if DEMO_PAIR.is_dir():
    MODELS.append("demo")
DRAWN = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0))
OWN = "own"
"""Model of the table's rows whose drafter only works with the verifier that it was made for."""
SHORT = 48
ROOMS = {
    "roomy": {},
    # Requests are preempted, prompts come in pieces, blocks are taken again.
    "tight": {"max_model_len": 128, "num_kv_blocks": 20, "max_num_batched_tokens": 24},
    "trickle": {"max_num_batched_tokens": 7, "block_size": 4, "num_kv_blocks": 600},
}
AXES = {
    "model": [*MODELS, OWN],
    "drafter": [
        *("eagle", "none", "right", "random", "ngram", "wrong", "malformed"),
        *("eagle1", "draft_model", "mtp", "shared_keys", "suffix", "bigram_drafter"),
        *("dflash", "jetspec", "dspark", "dflash2", "peagle", "eagle3_latent", "eagle3_layers"),
    ],
    "shape": ["tree", "chain", "drawn"],
    "trees": ["fixed", "adaptive"],
    "batch": ["8", "1"],
    "loop": ["waiting", "overlapped"],
    "rounds": ["eager", "graphs"],
    # Time of the draft: when the verifier waits for trees, or, as on a GPU, as soon as a round is launched.
    "drafting": ["awaited", "at once"],
    "room": list(ROOMS),
}
ONLY_FOR_ITS_OWN = {"mtp", "shared_keys"}
ONLY_FOR_LLAMA = {"wrong", "malformed", "eagle1", "draft_model", "suffix", "bigram_drafter"}
ONE_PASS = {"dflash", "jetspec", "dspark", "dflash2", "peagle"}
ONLY_FOR_LLAMA |= {*ONE_PASS, "eagle3_latent", "eagle3_layers"}
ONLY_TREES = {"random", "wrong", "malformed"}
GROWN = {"eagle", "eagle1", "eagle3_latent", "eagle3_layers", "draft_model", "mtp", "shared_keys", *ONE_PASS}
"""Drafters with ranked candidates, from which a tree may be drawn."""
SHAPES = {"tree": TREE, "chain": CHAIN, "drawn": DRAWN}
NEVER_TAKEN = {"none", "wrong", "malformed"}
OFTEN_TAKEN = {"right", "random", "ngram"}


def allowed(row):
    """Whether a row can run and adds something to the other rows."""
    drafter = row["drafter"]
    return (
        (row["model"] == OWN) == (drafter in ONLY_FOR_ITS_OWN)
        and (drafter not in ONLY_FOR_LLAMA or row["model"] == "llama")
        and (drafter not in {*ONLY_TREES, "none"} or row["shape"] == "tree")
        and (drafter in GROWN or row["shape"] != "drawn")
        and (drafter != "none" or row["trees"] == "fixed")
        and (row["batch"] == "8" or row["room"] != "tight")
    )


def table():
    """Rows in which all pairs of values meet; the first of each model and of each drafter is in every run."""
    seen, params = set(), []
    for row in pairwise(AXES, allowed):
        values = {("model", row["model"]), ("drafter", row["drafter"])}
        params.append(pytest.param(row, id="-".join(row.values()), marks=() if values - seen else pytest.mark.slow))
        seen |= values
    return params


@pytest.fixture(scope="module")
def kind_of(tmp_path_factory):
    """Kinds of drafters by name, each loaded with its verifier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(USER_DRAFTER)
        yield cache(lambda name: KINDS[name](tmp_path_factory.mktemp(name)))


def scripted(ref, plan, corrupt=None):
    return ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size, corrupt)


def demo_drafter(ref, speculation):
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    return EagleDrafter(load_eagle_head(DEMO_PAIR / "drafter", target), speculation)


def drafter_of(name, ref, speculation):
    """A drafter for any verifier. In right trees each accepted node lies behind two decoys: its KV must be moved."""
    if name == "eagle":
        return demo_drafter(ref, speculation) if ref.name == "demo" else eagle_drafter(ref.loaded, speculation)
    if name == "none":
        return None
    if name in TEXT_DRAFTERS:
        return text_drafter(name, speculation)
    right = right_chain if speculation.draft_top_k == 1 else right_tree
    plan = {"right": right, "random": random_tree, "wrong": wrong_tree, "malformed": right_tree}[name]
    return scripted(ref, plan, malform if name == "malformed" else None)


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MODELS)
def test_references_are_decisive_and_varied(model):
    ref = reference(model)
    shortest = min(range(len(ref.prompts)), key=lambda index: len(ref.prompts[index]))
    alone, _ = greedy(ref.loaded.model, [ref.prompts[shortest]], 2 * WINDOW)
    assert alone == [ref.continuations[shortest][: 2 * WINDOW]], "padding changes no text"
    assert sum(len(set(tokens)) for tokens in ref.continuations) > 8 * 10
    assert min(len(sequence) for sequence in ref.sequences) > 4 * WINDOW


@pytest.mark.few(2)
@pytest.mark.parametrize("row", table())
def test_the_text_is_that_of_generate(row, kind_of):
    name = row["drafter"]
    shape = SHAPES[row["shape"]]
    shape = SpeculationConfig.of_tree(drawn_tree(shape)) if shape is DRAWN else shape
    speculation = replace(shape, adaptive=row["trees"] == "adaptive")
    if name in KINDS and name not in TEXT_DRAFTERS:
        ref, drafter = kind_of(name).ref, kind_of(name).drafter(speculation)
    else:
        ref = reference(row["model"])
        drafter = drafter_of(name, ref, speculation)
    limits = ROOMS[row["room"]] | {"max_num_seqs": int(row["batch"]), "overlap": row["loop"] == "overlapped"}
    device = RecordingDevice() if row["rounds"] == "graphs" else None
    length = min(NUM_TOKENS if row["room"] == "roomy" else SHORT, *map(len, ref.continuations))
    count = 8 if row["batch"] == "8" else 2
    channel = partial(InProcessChannel, device=ref.loaded.device) if row["drafting"] == "at once" else InProcessChannel
    engine = build_engine(ref.loaded, engine_config(speculation, **limits), drafter, channel, device)
    try:
        tokens = Run(engine, ref.prompts[:count], greedy_params(length)).finish()
    finally:
        engine.model.remove_taps()
    assert tokens == [text[:length] for text in ref.continuations[:count]]
    stats, drafts = engine.stats(), engine.speculation
    assert stats.num_preemptions > 0 or row["room"] != "tight"
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert (stats.graphs is not None and sum(stats.graphs.replays.values()) > 0) == (row["rounds"] == "graphs")
    assert engine.drafter_state == ("none" if name == "none" else "attached")
    if name in NEVER_TAKEN:
        assert drafts.num_accepted_tokens == 0
    if name == "malformed":
        assert drafts.num_drafts == 0
    elif row["trees"] == "fixed" and row["room"] == "roomy" and row["batch"] == "8":
        assert (drafts.num_drafts > 0) == (name != "none")
        assert drafts.num_accepted_tokens > 0 or name not in OFTEN_TAKEN


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_all_that_is_right_is_accepted(shape):
    ref = reference("llama")
    drafter = drafter_of("right", ref, shape)
    tokens, engine = generate(ref.loaded, engine_config(shape), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    # The prompt yields the first token, and the last token comes alone; each round between yields 5 drafts and a bonus.
    num_drafts = 8 * ((NUM_TOKENS - 1) // 6)
    assert engine.speculation.num_drafts == num_drafts
    assert engine.speculation.num_accepted_tokens == 5 * num_drafts
    assert drafter.num_unknown == 0


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [SpeculationConfig(draft_top_k=1, draft_steps=5), SpeculationConfig(3, 4, 16)])
def test_trees_the_configuration_does_not_foresee(speculation):
    """Branches where chains are configured, and nodes deeper than the longest path a round may emit."""
    ref = reference("llama")

    def plan(upcoming, vocab_size, chance):
        room = speculation.num_nodes - 1
        if speculation.draft_top_k == 1:
            return [(vocab_size - 1 - upcoming[0], 0), *((t, i and i + 1) for i, t in enumerate(upcoming))][:room]
        nodes = right_tree(upcoming, vocab_size, chance)[:room]
        return nodes + [(upcoming[0], len(nodes) + extra) for extra in range(room - len(nodes))]

    tokens, engine = generate(ref.loaded, engine_config(speculation), scripted(ref, plan), ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.drafter_state == "attached"


def test_some_malformed_among_good_trees():
    ref = reference("llama")

    def sometimes(tree, chance):
        rows = [row for row in range(len(tree.num_valid)) if chance.random() < 0.4]
        for row in rows:
            malform(type(tree)(*(part[row : row + 1] for part in tree)), chance)

    drafter = scripted(ref, right_tree, sometimes)
    tokens, engine = generate(ref.loaded, engine_config(), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert 0 < engine.speculation.num_drafts < drafter.num_trees
