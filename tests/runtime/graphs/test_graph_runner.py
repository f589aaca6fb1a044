"""The graph runner: buckets, inert padding, fixed addresses, fallback and statistics on a fake device; CUDA itself."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphPool, GraphRunner, Stage

NUM_SLOTS, WIDTH = 16, 5


class Inputs(NamedTuple):
    slots: Tensor
    tokens: Tensor


class Outputs(NamedTuple):
    sums: Tensor
    taps: Tensor | None
    logits: Tensor


class FakeGraph(NamedTuple):
    function: Callable
    outputs: tuple
    pool: int


class FakeDevice:
    """Records calls; a graph is the function itself, its result copied over what the capture returned."""

    def __init__(
        self, failing: Callable[[int], bool] = lambda capture: False, error: type[RuntimeError] = RuntimeError
    ) -> None:
        self.failing, self.error = failing, error
        self.captured: list[FakeGraph] = []
        self.num_captures = self.num_pools = self.num_warm_ups = self.held_bytes = 0

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def warm_up(self, function):
        self.num_warm_ups += 1
        return function()

    def capture(self, function, pool):
        assert self.num_warm_ups > self.num_captures, "captured cold"
        self.num_captures += 1
        if self.failing(self.num_captures):
            try:
                raise self.error("operation not permitted when stream is capturing\ndetails")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        graph = FakeGraph(function, function(), pool)
        self.captured.append(graph)
        self.held_bytes += 1000
        return graph, graph.outputs

    def replay(self, graph):
        for old, new in zip(graph.outputs, graph.function(), strict=True):
            if old is not None:
                old.copy_(new)

    def synchronize(self):
        pass

    def memory_bytes(self):
        return self.held_bytes


class Counting:
    """A stage with state: adds each row's sum of tokens to its slot's total; slot 0 belongs to no sequence."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.totals = torch.zeros(NUM_SLOTS, dtype=torch.int64, device=device)
        self.weight = torch.randn(WIDTH, 7, device=device)
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, inputs: Inputs) -> Outputs:
        self.seen.append(tuple(part.data_ptr() for part in inputs))
        sums = inputs.tokens.sum(dim=1)
        self.totals.index_add_(0, inputs.slots, sums)
        hidden = torch.nn.functional.pad(inputs.tokens, (0, WIDTH))[:, :WIDTH].float()
        return Outputs(sums, None, torch.tanh(hidden @ self.weight))

    def padding_row(self, size: int) -> Inputs:
        device = self.totals.device
        return Inputs(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((1, size), -1, dtype=torch.int64, device=device),
        )


def runner_of(stage: Counting, buckets: list[Bucket], pool: GraphPool, name: Stage = Stage.BASE_DECODING):
    return GraphRunner(name, stage, stage.padding_row, buckets, pool)


def some_inputs(num_reqs: int, size: int, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(num_reqs * 100 + size)
    tokens = torch.randint(0, 50, (num_reqs, size), generator=generator)
    return Inputs(torch.arange(1, num_reqs + 1, device=device), tokens.to(device))


BUCKETS = [Bucket(n, size) for n in (1, 2, 4) for size in (3, 5)]


@pytest.mark.few(4)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize(("num_reqs", "size"), [(1, 3), (2, 5), (3, 5), (3, 2), (4, 4)])
def test_padding_changes_no_state_and_no_row(num_reqs, size, captured):
    stage, pool = Counting(), GraphPool(FakeDevice())
    runner = runner_of(stage, [Bucket(4, 5)], pool)
    if captured:
        pool.capture(runner)
    runner.run(Bucket(4, 5), some_inputs(4, 5))
    stage.totals.zero_()
    inputs = some_inputs(num_reqs, size)
    out = runner.run(Bucket(4, 5), inputs)
    # Missing columns of a row hold the padding row's tokens, which are -1 to the stage.
    expected = inputs.tokens.sum(dim=1) - (5 - size)
    assert out.sums.tolist() == expected.tolist()
    assert out.taps is None
    assert stage.totals[1 : num_reqs + 1].tolist() == expected.tolist()
    assert not stage.totals[num_reqs + 1 :].any()


def test_capturing_runs_on_padding_only():
    stage, pool = Counting(), GraphPool(FakeDevice())
    pool.capture(runner_of(stage, BUCKETS, pool))
    assert not stage.totals[1:].any()
    assert stage.totals[0] < 0


def test_the_caller_may_write_the_static_inputs_in_place():
    stage, pool = Counting(), GraphPool(FakeDevice())
    runner = runner_of(stage, [Bucket(2, 3)], pool)
    pool.capture(runner)
    inputs = some_inputs(2, 3)
    for view, part in zip(runner.inputs(Bucket(2, 3)), inputs, strict=True):
        view.copy_(part)
    assert runner.replay(Bucket(2, 3), 2).sums.tolist() == inputs.tokens.sum(dim=1).tolist()


def test_addresses_stay_and_static_inputs_are_contiguous():
    stage, pool = Counting(), GraphPool(FakeDevice())
    runner = runner_of(stage, BUCKETS, pool)
    pool.capture(runner)
    first = {bucket: tuple(part.data_ptr() for part in runner.inputs(bucket)) for bucket in BUCKETS}
    assert all(part.is_contiguous() for bucket in BUCKETS for part in runner.inputs(bucket))
    outputs = {
        bucket: runner.run(bucket, some_inputs(bucket.num_reqs, bucket.size)).logits.data_ptr() for bucket in BUCKETS
    }
    for _ in range(2):
        for bucket in BUCKETS:
            stage.seen.clear()
            assert runner.run(bucket, some_inputs(1, bucket.size)).logits.data_ptr() == outputs[bucket]
            assert stage.seen == [first[bucket]]
    assert len(set(outputs.values())) == len(BUCKETS)


def test_most_rows_are_captured_first_over_all_stages_in_one_pool():
    device = FakeDevice()
    pool = GraphPool(device)
    draft = runner_of(Counting(), [Bucket(1, 1), Bucket(8, 2)], pool, Stage.DRAFT_PROPOSAL)
    base = runner_of(Counting(), [Bucket(2, 4), Bucket(8, 8), Bucket(1, 2)], pool, Stage.BASE_VERIFICATION)
    pool.capture(draft, base)
    order = [(str(stage), bucket[:2]) for stage, bucket in pool.stats.captured]
    assert order == [
        ("base_verification", (8, 8)),
        ("draft_proposal", (8, 2)),
        ("base_verification", (2, 4)),
        ("base_verification", (1, 2)),
        ("draft_proposal", (1, 1)),
    ]
    assert {graph.pool for graph in device.captured} == {pool.handle}


def test_a_failed_capture_runs_eagerly_with_one_warning_that_names_it(caplog):
    device = FakeDevice(failing=lambda capture: capture == 2)
    stage, pool = Counting(), GraphPool(device)
    runner = runner_of(stage, [Bucket(4, 3), Bucket(2, 3), Bucket(1, 3)], pool, Stage.BASE_VERIFICATION)
    with caplog.at_level(logging.WARNING):
        pool.capture(runner)
        for bucket in runner.buckets:
            for _ in range(3):
                out = runner.run(bucket, some_inputs(bucket.num_reqs, bucket.size))
                assert out.sums.tolist() == some_inputs(bucket.num_reqs, bucket.size).tokens.sum(dim=1).tolist()
    [warning] = caplog.messages
    cause = "RuntimeError: operation not permitted when stream is capturing"
    assert all(text in warning for text in ("base_verification", "2x3", cause))
    assert pool.stats.failed == [(Stage.BASE_VERIFICATION, Bucket(2, 3), cause)]
    assert pool.stats.captured == [(Stage.BASE_VERIFICATION, Bucket(4, 3)), (Stage.BASE_VERIFICATION, Bucket(1, 3))]
    assert pool.stats.replays == {Stage.BASE_VERIFICATION: 6}
    assert pool.stats.eager_runs == {Stage.BASE_VERIFICATION: 3}
    # A failed capture's pool is not used again: the allocator may still treat it as capturing.
    assert device.captured[0].pool != device.captured[1].pool


def test_the_first_failure_of_a_stage_ends_its_captures_and_no_other_stages(caplog):
    device = FakeDevice(failing=lambda capture: capture == 1)
    pool = GraphPool(device)
    stages = (Stage.BASE_VERIFICATION, Stage.BASE_VERIFICATION, Stage.BASE_DECODING)
    sizes = ((4, 3, 1), (2, 1), (1,))
    hopeless, alike, other = (
        runner_of(Counting(), [Bucket(n, 3) for n in batches], pool, stage)
        for stage, batches in zip(stages, sizes, strict=True)
    )
    with caplog.at_level(logging.WARNING):
        pool.capture(hopeless, alike, other)
    assert len(caplog.messages) == len(pool.stats.failed) == 1
    assert device.num_captures == 2
    assert pool.stats.captured == [(Stage.BASE_DECODING, Bucket(1, 3))]
    inputs = some_inputs(1, 3)
    for runner in (hopeless, alike):
        assert runner.run(Bucket(1, 3), inputs).sums.tolist() == inputs.tokens.sum(dim=1).tolist()
    assert pool.stats.eager_runs == {Stage.BASE_VERIFICATION: 2}


def test_a_runner_that_fails_beside_one_of_its_stage_that_was_captured_ends_alone():
    """Only one of two sampling stages waits for the device and so cannot be captured."""
    device = FakeDevice(failing=lambda capture: capture == 2)
    pool = GraphPool(device)
    good, bad = (runner_of(Counting(), [Bucket(n, 3) for n in (2, 1)], pool, Stage.BASE_DECODING) for _ in range(2))
    pool.capture(good, bad)
    assert device.num_captures == 3
    assert good.has_graphs
    assert not bad.has_graphs


def test_a_capture_that_lacks_memory_leaves_the_smaller_ones_their_chance():
    device = FakeDevice(failing=lambda capture: capture == 1, error=torch.OutOfMemoryError)
    pool = GraphPool(device)
    pool.capture(runner_of(Counting(), [Bucket(4, 3), Bucket(1, 3)], pool, Stage.BASE_VERIFICATION))
    assert [bucket for _, bucket, _ in pool.stats.failed] == [Bucket(4, 3)]
    assert pool.stats.captured == [(Stage.BASE_VERIFICATION, Bucket(1, 3))]


def test_memory_is_counted_and_logged(caplog):
    pool = GraphPool(FakeDevice())
    with caplog.at_level(logging.INFO):
        pool.capture(runner_of(Counting(), BUCKETS, pool))
        pool.capture(runner_of(Counting(), BUCKETS[:1], pool, Stage.DRAFT_ACCEPT))
    assert pool.stats.memory_bytes == 7000
    assert "captured 6 of 6 CUDA graphs" in caplog.messages[0]
    assert "captured 1 of 1 CUDA graphs" in caplog.messages[1]


def test_a_stage_that_cannot_run_at_all_is_an_error():
    pool = GraphPool(FakeDevice())
    runner = GraphRunner(
        Stage.DRAFT_ACCEPT, lambda inputs: Outputs(inputs.tokens[0], None, inputs.tokens), Counting().padding_row,
        [Bucket(2, 3)], pool
    )  # fmt: skip
    with pytest.raises(ValueError, match="output sums of draft_accept is \\[3\\]: it must be a tensor of 2 rows"):
        pool.capture(runner)
    assert pool.stats.failed == []


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        (some_inputs(5, 3), "slots"),
        (some_inputs(2, 4), "tokens"),
        (Inputs(torch.zeros(1, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)), "tokens"),
        (Inputs(torch.zeros(3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)), "tokens"),
        (Inputs(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), "tokens"),
    ],
    ids=["too many rows", "too wide", "more rows than the first", "bucket's rows, not the first's", "a dim short"],
)
def test_inputs_that_do_not_fit_are_refused(inputs, field):
    runner = runner_of(Counting(), [Bucket(4, 3)], GraphPool(FakeDevice()))
    with pytest.raises(ValueError, match=f"^{field} of base_decoding has shape"):
        runner.run(Bucket(4, 3), inputs)


def test_unknown_and_empty_buckets_are_refused():
    pool = GraphPool(FakeDevice())
    with pytest.raises(ValueError, match="base_decoding has no bucket 3x3: it has 4x3"):
        runner_of(Counting(), [Bucket(4, 3)], pool).run(Bucket(3, 3), some_inputs(3, 3))
    with pytest.raises(ValueError, match="use at least one"):
        runner_of(Counting(), [], pool)
    with pytest.raises(ValueError, match="0x3"):
        runner_of(Counting(), [Bucket(0, 3)], pool)
    with pytest.raises(ValueError, match="padding row slots of draft_accept is \\[2\\]"):
        GraphRunner(Stage.DRAFT_ACCEPT, Counting(), lambda size: some_inputs(2, size), [Bucket(2, 3)], pool)


@pytest.mark.gpu
def test_cuda_graphs_compute_what_the_function_computes_at_every_bucket():
    stage, pool = Counting("cuda"), GraphPool(CudaGraphDevice(torch.device("cuda")))
    runner = runner_of(stage, BUCKETS, pool)
    pool.capture(runner)
    assert pool.stats.failed == []
    for bucket in BUCKETS:
        for num_reqs in range(1, bucket.num_reqs + 1):
            inputs = some_inputs(num_reqs, bucket.size, "cuda")
            expected = stage(inputs)
            stage.totals.zero_()
            out = runner.run(bucket, inputs)
            torch.testing.assert_close(out, expected)
            assert stage.totals[1 : num_reqs + 1].tolist() == expected.sums.tolist()
            assert not stage.totals[num_reqs + 1 :].any()
    assert pool.stats.replays[Stage.BASE_DECODING] == sum(bucket.num_reqs for bucket in BUCKETS)
    assert not pool.stats.eager_runs


@pytest.mark.gpu
def test_what_cuda_cannot_capture_runs_eagerly_and_harms_no_later_capture(caplog):
    stage, pool = Counting("cuda"), GraphPool(CudaGraphDevice(torch.device("cuda")))

    def waits(inputs: Inputs) -> Outputs:
        if inputs.tokens.shape[0] in (1, 2):
            inputs.tokens.sum().item()
        return stage(inputs)

    runner = GraphRunner(Stage.DRAFT_ACCEPT, waits, stage.padding_row, [Bucket(4, 3), Bucket(2, 3), Bucket(1, 3)], pool)
    pool.capture(runner)
    assert [failure[:2] for failure in pool.stats.failed] == [(Stage.DRAFT_ACCEPT, Bucket(n, 3)) for n in (2, 1)]
    assert all("captur" in failure.reason for failure in pool.stats.failed)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").shape == (3,)
    torch.cuda.MemPool()
    for bucket in runner.buckets:
        inputs = some_inputs(bucket.num_reqs, bucket.size, "cuda")
        torch.testing.assert_close(runner.run(bucket, inputs), stage(inputs))
    assert pool.stats.replays[Stage.DRAFT_ACCEPT] == 1
    assert pool.stats.eager_runs[Stage.DRAFT_ACCEPT] == 2
    later = GraphPool(pool.device)
    later.capture(runner_of(stage, BUCKETS, later))
    assert later.stats.failed == []
