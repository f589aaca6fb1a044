"""An engine's figures of requests and rounds agree with the tokens that it returned."""

from dataclasses import asdict
from types import NoneType

import numpy as np
import pytest

from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, new_engine
from tests.runtime.watchers import ContextDrafter, FailingEnd, Rig, dense_taps
from wingbeat.runtime.engine.engine_stats import stages_of
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphStats, Stage
from wingbeat.runtime.protocol.messages import REPLY_WORDS, DrafterFigures
from wingbeat.runtime.scheduling.request import Request

SHORT = 24


@pytest.fixture
def engine_of(ref):
    made = []

    def make(drafter=None, **limits):
        made.append(new_engine(ref.loaded, engine_config(TREE, **limits), drafter))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()


@pytest.fixture
def rig(ref):
    made = Rig(ref, ContextDrafter(ref, dense_taps(ref)))
    yield made
    made.engine.model.remove_taps()


def test_a_request_waits_until_it_has_had_a_slot_and_is_unknown_once_it_is_gone(ref, engine_of):
    engine = engine_of(max_num_seqs=1)
    for name in "ab":
        engine.add_request(Request(name, tuple(ref.prompts[0]), greedy_params(2)))
    assert [engine.is_waiting(name) for name in "abc"] == [True, True, False]
    engine.step()
    assert [engine.is_waiting(name) for name in "ab"] == [False, True]
    while engine.has_unfinished_requests():
        engine.step()
    assert [engine.is_waiting(name) for name in "ab"] == [False, False]


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "one behind"])
def test_tokens_and_phases_add_up(ref, engine_of, overlap):
    engine = engine_of(eagle_drafter(ref.loaded, TREE), overlap=overlap, max_num_batched_tokens=512)
    for index, prompt in enumerate(ref.prompts):
        engine.add_request(Request(str(index), tuple(prompt), greedy_params(SHORT)))
    waits = []
    while engine.has_unfinished_requests():
        waits += [output.queue_s for output in engine.step() if output.queue_s]
    times, num_requests = engine.stats().requests, len(ref.prompts)
    num_prompt_tokens = sum(map(len, ref.prompts))
    assert times.num_generation_tokens == num_requests * SHORT
    assert times.num_prompt_tokens == num_prompt_tokens
    # The only token of a one-token prompt is counted as a root, not as a prompt token.
    num_roots = sum(len(prompt) == 1 for prompt in ref.prompts)
    assert times.round_tokens.total == num_prompt_tokens - num_roots + num_requests * SHORT
    for phase in (times.queue_s, times.prefill_s, times.decode_s, times.inference_s):
        assert sum(phase.counts) == num_requests
    assert times.inference_s.total == pytest.approx(times.prefill_s.total + times.decode_s.total)
    assert (len(waits), sum(waits)) == (num_requests, pytest.approx(times.queue_s.total))


def test_a_wait_ends_where_the_first_round_begins(ref, engine_of, monkeypatch):
    engine = engine_of()
    launch, now = engine.runner.launch, 0.0

    def launch_for_five_seconds(*args):
        nonlocal now
        now += 5.0
        return launch(*args)

    monkeypatch.setattr(engine.runner, "launch", launch_for_five_seconds)
    monkeypatch.setattr(engine.requests, "_clock", lambda: now)  # the engine chose a clock when built
    engine.add_request(Request("r", tuple(ref.prompts[0]), greedy_params(1)))
    while engine.has_unfinished_requests():
        engine.step()
    times = engine.stats().requests
    assert (times.queue_s.total, times.prefill_s.total) == (0.0, 5.0)


def test_preempted_requests_wait_and_begin_once(ref, engine_of):
    engine = engine_of(max_model_len=128, num_kv_blocks=20)
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert sum(stats.requests.queue_s.counts) == sum(stats.requests.prefill_s.counts) == len(ref.prompts)
    assert stats.requests.num_generation_tokens == len(ref.prompts) * SHORT


def test_an_aborted_request_counts_with_what_it_went_through(ref, engine_of):
    engine = engine_of(max_num_seqs=1)
    for name in ("runs", "waits"):
        engine.add_request(Request(name, tuple(ref.prompts[0]), greedy_params(SHORT)))
    while not engine.stats().requests.num_generation_tokens:
        engine.step()
    for name in ("runs", "waits"):
        engine.abort_request(name)
    times = engine.stats().requests
    assert [sum(phase.counts) for phase in (times.queue_s, times.prefill_s, times.decode_s)] == [1, 1, 1]


def test_acceptance_by_context_and_depth_sums_to_the_whole(ref, rig):
    rig.run(ref.prompts, greedy_params(SHORT))
    stats = rig.engine.stats()
    whole = stats.speculation
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(part, name) for part in stats.by_context.values()) == getattr(whole, name) > 0
    assert list(stats.by_context) == ["1-512", "513-2048", "2049-8192", "8193-32768", "32769-131072", "131073-"]
    assert (sum(stats.tree_nodes.counts), stats.tree_nodes.total) == (whole.num_drafts, whole.num_draft_tokens)
    depths = whole.acceptance_histogram(stats.num_spec_tokens)
    assert len(depths) == stats.num_spec_tokens + 1
    assert sum(depths) == whole.num_drafts
    assert sum(depth * count for depth, count in enumerate(depths)) == whole.num_accepted_tokens


def test_plain_rounds_say_why(ref, engine_of, rig):
    alone = engine_of()
    Run(alone, ref.prompts[:1], greedy_params(SHORT)).finish()
    assert alone.stats().plain_rounds == {"no_drafter": SHORT - 1}
    rig.run(ref.prompts[:1], greedy_params(SHORT, speculation=False))
    assert rig.engine.stats().plain_rounds == {"not_asked": SHORT - 1}
    rig.engine.forget()
    rig.run(ref.prompts[1:2], greedy_params(SHORT))
    assert set(rig.engine.stats().plain_rounds) <= {"idle"}
    rig.replace(ContextDrafter(ref, dense_taps(ref)), lambda end: FailingEnd(end, "wait", 0, False))
    rig.engine.forget()
    rig.run(ref.prompts[2:3], greedy_params(SHORT))
    assert rig.engine.stats().plain_rounds["drafter_lost"] >= SHORT - 3


def test_every_figure_is_zero_after_a_trial(ref, engine_of):
    engine = engine_of(eagle_drafter(ref.loaded, TREE))
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    engine.forget()
    stats = engine.stats()
    assert (stats.requests.num_generation_tokens, sum(stats.requests.queue_s.counts)) == (0, 0)
    assert (sum(stats.tree_nodes.counts), stats.plain_rounds, stats.prefix_query_tokens) == (0, {}, 0)


def test_devices_are_timed_by_stage_on_both_sides_and_anew_after_a_trial(ref, rig):
    rig.run(ref.prompts[:2], greedy_params(SHORT))
    engine = rig.engine
    seconds = engine.stats().device_s
    assert seconds.keys() == {"prefill", "verify", "accept", "draft_commit", "draft_levels"}
    assert all(value > 0 for value in seconds.values())
    engine.forget()
    assert not any(engine.stats().device_s.values())


def test_a_drafters_figures_survive_the_header_and_come_out_in_range_whatever_it_holds():
    header = np.zeros(REPLY_WORDS, dtype=np.int64)
    counts = {"captured": 3, "failed": 2**20 - 1, "eager": 1}
    figures = DrafterFigures(10**18, 7, 2**32 - 1, 9, 2**40, 5, **counts, device_parts_us=tuple(range(8)))
    figures.write(header)
    assert DrafterFigures.read(header) == figures
    for hostile in (-1, 2**63 - 1, -(2**63)):
        header[2:] = hostile
        read = DrafterFigures.read(header)
        assert min(*read[:-1], *read.device_parts_us) >= 0
        assert max(read.commit_us, read.levels_us, read.reply_us) < 2**32


def test_stages_that_nobody_captures_are_left_out_and_failures_of_either_process_are_not():
    failed = GraphStats(captured=[(Stage.DRAFT_ACCEPT, Bucket(1, 1))] * 3, num_untried=2)
    assert stages_of(None, DrafterFigures()) == {}
    assert stages_of(failed, DrafterFigures(failed=4)) == {
        "verifier": {"captured": 3, "failed": 0, "eager": 2},
        "drafter": {"captured": 0, "failed": 4, "eager": 0},
    }


def plain(value: object) -> bool:
    """Whether a value consists of built-in types, which every process can unpickle."""
    if type(value) in (list, tuple):
        return all(map(plain, value))
    if type(value) is dict:
        return all(plain(key) and plain(part) for key, part in value.items())
    return type(value) in (str, int, float, bool, NoneType)


def test_figures_travel_as_plain_data(ref, rig):
    rig.run(ref.prompts, greedy_params(SHORT))
    rig.run(ref.prompts, greedy_params(SHORT, speculation=False))
    figures = asdict(rig.engine.stats())
    assert figures["plain_rounds"]
    assert [name for name, value in figures.items() if not plain(value)] == []


def test_preemptions_are_counted_by_request(ref, engine_of):
    engine = engine_of(max_model_len=128, num_kv_blocks=12, max_num_batched_tokens=33)
    for index, prompt in enumerate(ref.prompts):
        engine.add_request(Request(str(index), tuple(prompt), greedy_params(48)))
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.requests.num_preemptions.total == stats.num_preemptions
    assert sum(stats.requests.num_preemptions.counts) == len(ref.prompts)
    usable = (engine.cache.num_blocks - 1) * engine.config.block_size
    assert stats.cache_config["kv_cache_size_tokens"] == str(usable)
    assert stats.cache_config["kv_cache_max_concurrency"] == f"{usable / 128:.2f}"
    assert stats.cache_config["kv_cache_memory_bytes"] == str(engine.cache.num_blocks * engine.cache.block_bytes)
