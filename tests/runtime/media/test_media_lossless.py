"""Models that take images or audio write what generate() writes, whatever is drafted, cached, preempted or replayed."""

import pytest

from tests.runtime.lossless_table import AXES, drafter_of, rows
from tests.runtime.media.media_world import AUDIO_CONFIGS, CONFIGS, NUM_TOKENS, ShownRun, dense_taps, shown
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params, new_engine
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.watchers import TAPS, ContextDrafter, FailingEnd, Rig
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams

ALL = {name: (CONFIGS | AUDIO_CONFIGS)[name] for name in ("qwen2_audio", "llava", "gemma3", *AUDIO_CONFIGS, *CONFIGS)}
"""The first ones are in the default run."""
ROOMS = {
    "roomy": {},
    # Requests wait for room or are preempted, and prompts come in pieces.
    "tight": {"max_model_len": 116, "num_kv_blocks": 36, "block_size": 4, "max_num_batched_tokens": 24},
    "trickle": {"max_num_batched_tokens": 17},
    "no cache": {"enable_prefix_caching": False},
}


@pytest.fixture
def run_of():
    """(reference, drafter, params, limits) -> the run through an engine of its own."""
    engines = []

    def make(ref, drafter=None, params=None, speculation=TREE, on_host=None, **limits):
        engines.append(new_engine(ref.loaded, engine_config(speculation, **limits), drafter, on_host))
        return ShownRun(engines[-1], ref.prompts, ref.media, params or greedy_params(NUM_TOKENS))

    yield make
    for engine in engines:
        engine.model.remove_taps()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_references_are_decisive_and_their_images_are_served(name):
    ref = shown(name)
    assert ref.loaded.takes == {ref.loaded.reader.family.kind: "served"}
    assert sum(len(set(tokens)) for tokens in ref.continuations) > 4 * 6


@pytest.mark.few(2)
@pytest.mark.parametrize(AXES, rows(ALL, ROOMS))
def test_the_text_is_that_of_generate(run_of, model, kind, shape, room, device):
    ref, speculation = shown(model), {"tree": TREE, "chain": CHAIN}[shape]
    on_host = None if device == "host" else False
    run = run_of(ref, drafter_of(kind, ref, speculation), None, speculation, on_host, **ROOMS[room])
    assert run.finish() == ref.continuations
    if kind == "right":
        assert run.engine.speculation.acceptance_length > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_preempted_requests_are_computed_again_with_their_images(run_of, name):
    ref = shown(name)
    run = run_of(ref, None, None, CHAIN, **ROOMS["tight"] | {"max_model_len": 120, "enable_prefix_caching": False})
    assert run.finish() == ref.continuations
    assert run.engine.stats().num_preemptions > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*reversed(ALL)])
def test_captured_rounds_beside_prompts_in_pieces_write_the_same(name):
    """A replay rotates what is behind an image by what its slot says then."""
    ref = shown(name)
    limits = engine_config(TREE, max_num_seqs=3, max_num_batched_tokens=40)
    engine = build_engine(ref.loaded, limits, drafter_of("right", ref, TREE), InProcessChannel, RecordingDevice())
    try:
        run = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        assert run.finish() == ref.continuations
    finally:
        engine.model.remove_taps()
    assert sum(engine.stats().graphs.replays.values()) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_sampled_text_is_that_of_plain_decoding(run_of, name):
    ref = shown(name)
    params = [SamplingParams(NUM_TOKENS, 0.8, 0.9, seed=seed, ignore_eos=True) for seed in range(len(ref.prompts))]
    plain = run_of(ref, None, params).finish()
    sequences = [prompt + more for prompt, more in zip(ref.prompts, plain, strict=True)]
    for speculation in (CHAIN, TREE):
        run = run_of(ref, drafter_of("right", ref, speculation, sequences), params, speculation)
        assert run.finish() == plain
        assert run.engine.speculation.acceptance_length > 4
    assert plain != ref.continuations


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_a_prefix_with_the_same_media_is_found_and_its_text_stays(run_of, name):
    ref = shown(name)
    first = run_of(ref, block_size=4, num_kv_blocks=400)
    first.finish()
    again = ShownRun(first.engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
    assert again.finish() == ref.continuations
    assert [again.last[index].num_cached_tokens for index in range(len(ref.prompts))] == [
        (len(prompt) - 1) // 4 * 4 for prompt in ref.prompts
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_equal_tokens_of_another_medium_share_no_prefix(run_of, name):
    """The text before the image is shared, and nothing behind its first token."""
    ref, other = shown(name), shown(name)
    run = run_of(ref, block_size=4, num_kv_blocks=400)
    run.finish()
    prompt, (mine, *_) = ref.prompts[0], ref.media[0]
    shown_in = ref.loaded.reader.family.inputs[0]
    arrays = {**mine.arrays, shown_in: -mine.arrays[shown_in]}
    changed = mine.of(mine.start, mine.length, arrays, mine.grid, mine.kind, mine.whole)
    again = ShownRun(run.engine, [prompt], [(changed,)], greedy_params(NUM_TOKENS))
    text = again.finish()
    assert again.last[0].num_cached_tokens == mine.start // 4 * 4
    alone = new_engine(other.loaded, engine_config(enable_prefix_caching=False))
    assert text == ShownRun(alone, [prompt], [(changed,)], greedy_params(NUM_TOKENS)).finish()
    assert text[0] != ref.continuations[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_equal_tokens_without_a_medium_share_no_prefix_with_it(run_of, name):
    """Placeholders that a caller writes are words of the vocabulary."""
    ref = shown(name)
    run = run_of(ref, block_size=4, num_kv_blocks=400)
    run.finish()
    bare = ShownRun(run.engine, [ref.prompts[0]], [()], greedy_params(1))
    bare.finish()
    assert bare.last[0].num_cached_tokens == ref.media[0][0].start // 4 * 4


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["acquire", "wait"])
@pytest.mark.parametrize("name", ALL)
def test_a_lost_drafter_costs_no_request_and_its_heir_gets_true_taps(name, what):
    """Prompts are replayed with their images in them."""
    ref = shown(name)
    taps = dense_taps(ref, TAPS)
    one = Rig(ref, ContextDrafter(ref, taps), lambda end: FailingEnd(end, what, 2, False), max_num_batched_tokens=64)
    try:
        run = ShownRun(one.engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        while one.engine.drafter_state == "attached":
            one.step(run)
        one.step(run)
        heir = ContextDrafter(ref, taps)
        one.replace(heir)
        assert one.finish(run) == ref.continuations
    finally:
        one.engine.model.remove_taps()
    assert heir.num_checked > 0
    assert one.engine.stats().num_replayed_tokens > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_another_engine_goes_on_from_the_tokens_so_far(run_of, name):
    """As after the loss of the first one, to which the images are handed over too."""
    ref = shown(name)
    begun = [
        Request(str(index), tuple(prompt), greedy_params(NUM_TOKENS), tuple(tokens[:7]), spans=media)
        for index, (prompt, media, tokens) in enumerate(zip(ref.prompts, ref.media, ref.continuations, strict=True))
    ]
    engine = new_engine(ref.loaded, engine_config())
    run = ShownRun(engine, [], [], [])
    run.tokens = [[] for _ in begun]
    for request in begun:
        engine.add_request(request)
    assert run.finish() == [tokens[7:] for tokens in ref.continuations]
