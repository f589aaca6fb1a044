"""Every kind of drafter, loaded as a user would name it: speed may change, no token does.

A row of `test_losslessness` compares the greedy text of each kind with generate()'s.
"""

import pytest

from tests.runtime.drafter_kinds import KINDS, USER_DRAFTER, Kind
from tests.runtime.models import CHAIN, TREE, Run, engine_config, generate, greedy_params, new_engine
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import connect
from wingbeat.runtime.scheduling.request import SamplingParams

SHORT = 32
SHAPES = {"tree": TREE, "chain": CHAIN}
PROPOSING = {"eagle1", "eagle3", "draft_model", "foreign_vocabulary", "mtp", "shared_keys", "bigram_drafter"}
PROPOSING |= {"eagle3_latent", "eagle3_layers", "dflash", "jetspec", "dspark", "dflash2", "peagle"}
"""Kinds that have a tree for every context; the others need one that occurred before."""
IN_EVERY_RUN = {"eagle3", "dflash"}


class World:
    """A kind, and what its verifier writes plainly."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.ref, self.drafter = kind, kind.ref, kind.drafter
        self.greedy = [tokens[:SHORT] for tokens in kind.ref.continuations]
        self.sampled, _ = generate(kind.ref.loaded, engine_config(), None, kind.ref.prompts, sampled_params())


def some(names, chosen):
    """Parameters of a test; names that are not among `chosen` are marked `slow`."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=some(KINDS, IN_EVERY_RUN))
def kind(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(USER_DRAFTER)
        yield World(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(params=some(SHAPES, {"tree"}))
def shape(request):
    return SHAPES[request.param]


def sampled_params(**fields) -> list[SamplingParams]:
    """Eight seeds at three temperatures."""
    return [
        SamplingParams(max_tokens=SHORT, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True, **fields)
        for seed, (temperature, top_p) in enumerate([(0.7, 1.0), (1.0, 0.9), (1.2, 1.0), (0.7, 0.8)] * 2)
    ]


def test_sampled_text_is_that_of_plain_decoding(kind, shape):
    config = engine_config(shape, overlap=shape is CHAIN)
    tokens, engine = generate(kind.ref.loaded, config, kind.drafter(shape), kind.ref.prompts, sampled_params())
    assert tokens == kind.sampled
    assert engine.drafter_state == "attached"


@pytest.mark.slow
def test_cached_prefixes_are_cached_for_the_drafter_too(kind):
    """Prompts run again, then prompts that diverge from them in the middle of a block."""
    engine = new_engine(kind.ref.loaded, engine_config(block_size=4, num_kv_blocks=600), kind.drafter(TREE))
    first, texts = kind.ref.prompts[:5], kind.greedy[:5]
    assert Run(engine, first, greedy_params(SHORT)).finish() == texts
    before = engine.speculation.num_drafts
    forks = [[*prompt, *tokens[:10]] for prompt, tokens in zip(first, texts, strict=True)]
    for prompts, skipped in ((first, 0), (forks, 10)):
        run = Run(engine, prompts, greedy_params(SHORT - skipped))
        assert run.finish() == [tokens[skipped:] for tokens in texts]
        assert sum(output.num_cached_tokens for output in run.last.values()) > 100
    assert engine.speculation.num_drafts > before
    engine.model.remove_taps()


def test_another_drafter_may_take_over_in_the_middle(kind, shape):
    engine = new_engine(kind.ref.loaded, engine_config(shape), kind.drafter(shape))
    run = Run(engine, kind.ref.prompts, greedy_params(SHORT))
    for _ in range(6):
        run.step()
    engine.detach_drafter()
    for _ in range(3):
        run.step()
    assert engine.drafter_state == "none"
    before = engine.speculation.num_drafts
    connect(engine, kind.drafter(shape), InProcessChannel)
    assert run.finish() == kind.greedy
    assert engine.stats().num_drafters_attached == 2
    assert engine.speculation.num_drafts > before
    engine.model.remove_taps()


def test_requests_that_switch_speculation_off_get_their_plain_text(kind, shape, request):
    """Greedy and sampled requests in one batch, every other one without speculation."""
    params = [
        greedy_params(SHORT, speculation=index % 2 == 0) if index < 4 else sampled
        for index, sampled in enumerate(sampled_params())
    ]
    params[5], params[7] = (sampled_params(speculation=False)[index] for index in (5, 7))
    engine = new_engine(kind.ref.loaded, engine_config(shape), kind.drafter(shape))
    run = Run(engine, kind.ref.prompts, params)
    assert run.finish() == kind.greedy[:4] + kind.sampled[4:]
    drafts = [run.last[index].metrics.num_drafts for index in range(8)]
    assert not any(drafts[1::2])
    always = request.node.callspec.params["kind"] in PROPOSING
    assert all(drafts[0::2]) if always else any(drafts[0::2])
    engine.model.remove_taps()
