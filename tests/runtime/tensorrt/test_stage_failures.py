"""Failures and their consequences: captures, capacities, batches, devices."""

import pytest
import torch

from tests.runtime.models import TREE, Run, engine_config, greedy_params, prepare_model, random_head, random_model
from tests.runtime.tensorrt.captured import captured_pair
from tests.runtime.tensorrt.engine_world import (
    LIMITS,
    base_config,
    base_session,
    draft_config,
    draft_session,
    engine_on,
    torch_pair,
)
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.tensorrt.base_runner import BasePass, BaseRunner
from wingbeat.runtime.tensorrt.draft_runner import DraftedTree, DraftRunner, KnownPairs
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineLoadError, EngineStage, TensorSpec, WrongInputError
from wingbeat.runtime.tensorrt.stage_runner import CapacityExceededError, RowRange, row_ranges

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def llama():
    return prepare_model(random_model("llama"), "llama")


def run(engine, num_prompts=2):
    prompts = [list(range(1, 9)), list(range(20, 33))][:num_prompts]
    return Run(engine, prompts, greedy_params(NUM_TOKENS)).finish()


@pytest.fixture(scope="module")
def expected(llama):
    engine, _, _ = torch_pair(llama, TREE, engine_config(TREE, max_num_seqs=2, num_kv_blocks=None))
    return run(engine)


@pytest.mark.few(1)
@pytest.mark.parametrize("failing", [None, "verify", "plain", "proposal", "accept"])
def test_a_stage_that_cannot_be_captured_runs_eagerly_alone(llama, expected, failing):
    engine, drafter, graphs = captured_pair(llama, () if failing is None else (EngineStage(failing),))
    assert run(engine) == expected
    base, draft = engine.model.runner.stages, drafter.runner.stages
    captured = {str(stage) for stage in (*base.captured, *draft.captured)}
    assert captured == {"verify", "plain", "proposal", "accept"} - {failing}
    assert {str(stage) for stage in (*base.failed, *draft.failed)} == ({failing} if failing else set())
    assert graphs.num_replays > 0


def test_a_dead_device_ends_the_engine_and_says_why(llama):
    engine, session, _ = torch_pair(llama, TREE, engine_config(TREE, max_num_seqs=2, num_kv_blocks=None))
    started = Run(engine, [[1, 2, 3]], greedy_params(NUM_TOKENS))
    started.step()
    session.dead = "the device is lost"
    with pytest.raises(RoundFailed, match="the device is lost"):
        started.finish()


def test_a_draft_engine_that_dies_costs_no_text(llama, expected):
    engine, _, draft = torch_pair(llama, TREE, engine_config(TREE, max_num_seqs=2, num_kv_blocks=None))
    prompts = [list(range(1, 9)), list(range(20, 33))]
    started = Run(engine, prompts, greedy_params(NUM_TOKENS))
    started.step()
    draft.dead = "the device is lost"
    engine.detach_drafter()
    assert started.finish() == expected


@pytest.fixture
def base(llama):
    config = base_config(llama, (1, 2))
    kv = LinearKV(llama.layers, LIMITS.max_batch_size + 1, LIMITS.capacity, torch.float32, torch.device("cpu"))
    return BaseRunner(base_session(llama, config), config, kv)


def one_pass(rows, num_rows, start=0, dtype=torch.int64):
    num_seqs = len(rows)
    ids = torch.zeros(num_seqs, num_rows, dtype=dtype)
    positions = torch.arange(num_rows).expand(num_seqs, -1).contiguous()
    mask = torch.ones(num_seqs, num_rows, LIMITS.capacity, dtype=torch.bool)
    selected = torch.zeros(num_seqs, 1, dtype=torch.int64)
    return BasePass(rows, [start] * len(rows), ids, positions, selected, {0: mask})


def test_more_tokens_than_the_capacity_are_refused_with_row_and_numbers(base):
    with pytest.raises(
        CapacityExceededError, match=f"KV row 2: 8 tokens from {LIMITS.capacity - 4} exceed its capacity"
    ):
        base.run(one_pass([2], 8, start=LIMITS.capacity - 4))


def test_a_batch_that_changed_is_refused(base):
    with pytest.raises(WrongInputError, match="token_ids is of 2 sequences: the batch has 3"):
        base.run(one_pass([1, 2], 4)._replace(kv_rows=[1, 2, 3], starts=[0, 0, 0]))


def test_a_wrong_dtype_is_refused_by_name(base):
    with pytest.raises(WrongInputError, match=r"input_ids is torch\.int32: the graph has torch\.int64"):
        base.run(one_pass([1], 4, dtype=torch.int32))


def test_a_prompt_longer_than_the_engine_takes_is_refused(base):
    with pytest.raises(WrongInputError, match="a pass of 65 tokens a sequence: max_input_len is 64"):
        base.run(one_pass([1], 65))


def test_a_proposal_commits_nothing_and_needs_a_committed_context(llama):
    head = random_head(llama)
    config = draft_config(head)
    kv = LinearKV(config.layers, 3, LIMITS.capacity, torch.float32, torch.device("cpu"))
    runner = DraftRunner(draft_session(head, config), config, kv)
    taps = torch.randn(1, 5, head.taps_size, generator=torch.Generator().manual_seed(1))
    runner.prefill(KnownPairs([1], [0], [5], torch.arange(5)[None], taps))
    before = [cache[1, :, :5].clone() for cache in kv.layers[0]]
    nodes, depths = torch.ones(1, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    visible, selected = torch.eye(4, dtype=torch.bool)[None], torch.tensor([[2, 3]])
    tree = DraftedTree([1], [5], nodes, torch.ones(1, 4, head.hidden_size), depths, visible)
    output = runner.proposal(tree, selected)
    assert output.logits.shape == (1, 2, config.draft_vocab_size)
    assert runner.committed[1] == 5
    assert all(torch.equal(cache[1, :, :5], kept) for cache, kept in zip(kv.layers[0], before, strict=True))
    with pytest.raises(WrongInputError, match="KV row 1 continues at position 9: 5 of its pairs are committed"):
        runner.proposal(tree._replace(starts=[9]), selected)
    runner.accept(KnownPairs([1], [5], [2], torch.arange(3)[None], taps[:, :3]))
    assert runner.committed[1] == 7


def test_ranges_of_rows_hold_all_rows_and_no_more_than_a_batch():
    assert row_ranges([3, 1, 2], 4) == [RowRange(1, 4, [1, 2, 3], [1, 2, 0])]
    assert row_ranges([9, 1, 2], 4) == [RowRange(1, 3, [1, 2], [1, 2]), RowRange(9, 10, [9], [0])]
    assert row_ranges([3, 1], 4, gaps=False) == [RowRange(1, 2, [1], [1]), RowRange(3, 4, [3], [0])]
    assert row_ranges([], 4) == []


@pytest.mark.parametrize("num_rows", [16, 40])
def test_a_pass_over_some_rows_leaves_what_those_between_keep(base, num_rows):
    longest = LIMITS.max_kv_cache_capacity
    for cache in base.kv.rows(2, 3):
        cache.normal_(generator=torch.Generator().manual_seed(2))
    before = [cache[..., :longest, :].clone() for cache in base.kv.rows(2, 3)]
    base.run(one_pass([1, 3], num_rows))
    assert all(torch.equal(now[..., :longest, :], old) for now, old in zip(base.kv.rows(2, 3), before, strict=True))


def test_a_graph_that_its_config_does_not_describe_is_refused_by_name(llama):
    config = base_config(llama, (1, 2))
    kv = LinearKV(llama.layers, 3, LIMITS.capacity, torch.float32, torch.device("cpu"))
    with pytest.raises(EngineLoadError, match="hidden_states is not in the graph"):
        BaseRunner(base_session(llama, base_config(llama, ())), config, kv)
    session = base_session(llama, config)
    session.outputs = session.outputs | {"logits": TensorSpec(torch.float32, (-1, -1, 7))}
    with pytest.raises(EngineLoadError, match=r"logits is torch.float32 \[-1, -1, 7\] in the graph"):
        BaseRunner(session, config, kv)


def test_taps_that_the_engine_was_not_built_with_are_refused(llama):
    config = base_config(llama, (1, 2))
    drafter = EngineDrafter(draft_session(random_head(llama), draft_config(random_head(llama))), *_drafts(llama))
    with pytest.raises(ValueError, match=r"tap_layers is \(1, 2\): the drafter needs \(1, 2, 3\)"):
        engine_on(base_session(llama, config), config, engine_config(TREE, num_kv_blocks=None), drafter)


def _drafts(loaded):
    head = random_head(loaded)
    return draft_config(head), head.draft_token_ids, TREE
