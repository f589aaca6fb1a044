"""CUDA graphs of a replica's stages, which are captured per bucket and read inputs at fixed addresses.

A stage runs eagerly if capturing fails. This module does not depend on models and schedulers. A stage is a function
from one NamedTuple of tensors to another; its closure holds state that outlives a round (weights, KV pool, slot
tables).
"""

import logging
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.marks import Marks, NewEvent
from wingbeat.runtime.verifier_errors import BackendLost

logger = logging.getLogger(__name__)

InputsT = TypeVar("InputsT", bound=tuple)
OutputsT = TypeVar("OutputsT", bound=tuple)


class Stage(StrEnum):
    """Kinds of computation that are captured. The text below each stage states the meaning of `Bucket.size`."""

    DRAFT_PROPOSAL = "draft_proposal"
    """Commits decided tokens and grows all levels of trees; the size is the depth."""
    DRAFT_RULED = "draft_ruled"
    """As DRAFT_PROPOSAL, for batches in which a request has sampling rules."""
    DRAFT_PREFILL = "draft_prefill"
    """Computes draft KV of prompt chunks; its requests are pieces, and the size is the number of rows of a piece."""
    DRAFT_ACCEPT = "draft_accept"
    """Computes draft KV of accepted tokens; the size is the maximum number of accepted tokens."""
    BASE_VERIFICATION = "base_verification"
    """Forward pass over trees; the size is the number of nodes."""
    BASE_DECODING = "base_decoding"
    """Forward pass over bare roots; the size is 1."""
    BASE_MIXED = "base_mixed"
    """Forward pass over trees or bare roots, and prompt chunks; the size is the number of nodes."""
    BASE_PROMPTS = "base_prompts"
    """Forward pass over prompt chunks alone; its requests are pieces, and the size is the number of rows of a piece."""
    BASE_CHOICE = "base_choice"
    """Token choice, tree walk, compaction and taps after any forward pass; the size is the number of nodes."""
    WHOLE_ROUND = "whole_round"
    """BASE_VERIFICATION, BASE_CHOICE and DRAFT_PROPOSAL of a drafter in the engine's process; the size is the number of
    nodes."""


class Bucket(NamedTuple):
    """Shape of one graph."""

    num_reqs: int
    size: int = 1
    beside: int = 0
    """Number of additional rows, which are rows of prompt pieces and belong to no request of the inputs."""

    @property
    def num_rows(self) -> int:
        """Number of computed rows."""
        return self.num_reqs * self.size + self.beside

    def __str__(self) -> str:
        return f"{self.num_reqs}x{self.size}" + (f"+{self.beside}" if self.beside else "")


class GraphFailure(NamedTuple):
    """A failed capture; its stage runs eagerly for its bucket."""

    stage: Stage
    bucket: Bucket
    reason: str


@dataclass
class GraphStats:
    """Captured graphs, failures, and run counts by stage."""

    captured: list[tuple[Stage, Bucket]] = field(default_factory=list)
    failed: list[GraphFailure] = field(default_factory=list)
    # The counts are plain dicts, because dataclasses.asdict rebuilds a Counter by counting its items.
    replays: dict[Stage, int] = field(default_factory=dict)
    eager_runs: dict[Stage, int] = field(default_factory=dict)
    num_untried: int = 0
    """Number of buckets that were not tried, because another bucket of the stage had failed or the settings exclude the
    bucket."""
    memory_bytes: int = 0
    """Bytes of device memory that the captured graphs hold."""

    def counts(self) -> dict[str, int]:
        """Returns the number of (stage, bucket) pairs by state. Failed pairs run eagerly."""
        return {"captured": len(self.captured), "failed": len(self.failed), "eager": self.num_untried}

    def count_replay(self, stage: Stage) -> None:
        """Counts a replay."""
        self.replays[stage] = self.replays.get(stage, 0) + 1

    def count_eager_run(self, stage: Stage) -> None:
        """Counts a run of the stage's function in place of a graph."""
        self.eager_runs[stage] = self.eager_runs.get(stage, 0) + 1

    def forget_runs(self) -> None:
        """Resets the counts of runs; counts of captures stay."""
        self.replays.clear()
        self.eager_runs.clear()


class GraphPool:
    """Memory and statistics shared by all graphs of a replica.

    Graphs of one pool reuse each other's memory, so these graphs must be replayed one after another on the same stream.
    A graph's outputs may be in memory that another graph of the pool uses for intermediate results, so callers that
    need outputs after another replay must copy the outputs.

    Args:
        new_event: factory of events for `mark`, see `marks.events_of`; None ignores marks.
    """

    def __init__(self, device: GraphDevice, new_event: NewEvent | None = None) -> None:
        self.device = device
        self.stats = GraphStats()
        self.stage_s: dict[str, float] = {}
        """Device seconds of the replays that were measured, by name of the mark that ends the work."""
        self._new_event = new_event
        self._marks: Marks | None = None
        self.handle = device.new_pool()
        self.paused = False
        """If True, every stage runs its function, in the shapes of its graphs, instead of replaying the graphs."""

    def capture(self, *runners: "GraphRunner") -> None:
        """Captures every bucket of `runners`, largest first, so that small buckets reuse the memory of large buckets.

        If a stage's first capture fails for another reason than memory, no other bucket of the stage is tried, because
        an invalid operation fails in all captures of a model and each attempt costs seconds and a memory pool. If a
        runner's first capture fails although another runner of the stage has graphs, no other bucket of that runner is
        tried.

        Raises:
            Exception: a stage raised this exception when it ran eagerly. A failed capture is only recorded.
        """
        jobs = [(runner, bucket) for runner in runners for bucket in runner.buckets]
        jobs.sort(key=lambda job: job[1].num_rows, reverse=True)
        stats, captured_before = self.stats, len(self.stats.captured)
        bytes_before, started = self.device.memory_bytes(), time.perf_counter()
        hopeless: set[GraphRunner | Stage] = set()
        for runner, bucket in _with_progress(jobs):
            if runner in hopeless or runner.stage in hopeless:
                stats.num_untried += 1
                continue
            error = runner.capture(bucket)
            if error is None or runner.has_graphs or isinstance(_root(error), torch.OutOfMemoryError):
                continue
            others = any(other.has_graphs for other in runners if other.stage == runner.stage)
            hopeless.add(runner if others else runner.stage)
        memory_bytes = max(self.device.memory_bytes() - bytes_before, 0)
        stats.memory_bytes += memory_bytes
        logger.info(
            "captured %d of %d CUDA graphs in %.1f s, %.1f MiB",
            len(stats.captured) - captured_before,
            len(jobs),
            time.perf_counter() - started,
            memory_bytes / 2**20,
        )

    def mark(self, name: str) -> None:
        """Marks a point of the pass that is being captured: the time since the previous mark counts for `name`."""
        if self._marks is not None and self._new_event is not None:
            self._marks.add(name, self._new_event())

    @contextmanager
    def marking(self) -> Iterator[Marks]:
        """Context manager of a capture, within which `mark` adds to the marks that are returned."""
        self._marks = marks = Marks()
        try:
            yield marks
        finally:
            self._marks = None

    def measure(self, marks: Marks) -> None:
        """Adds the times of a graph's latest replay, if the replay has finished."""
        for name, seconds in marks.read().items():
            self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds

    def note_failure(self, stage: Stage, bucket: Bucket, error: Exception) -> None:
        """Records and logs a failed capture, and replaces the memory pool, which may still be in capture mode."""
        failure = GraphFailure(stage, bucket, first_cause(error))
        self.stats.failed.append(failure)
        self.handle = self.device.new_pool()
        logger.warning("CUDA graph of %s, bucket %s, was not captured and runs eagerly: %s", *failure)


class _Captured(NamedTuple):
    graph: Any
    outputs: tuple
    marks: Marks | None
    """None if the graph holds no events."""


class GraphRunner(Generic[InputsT, OutputsT]):
    """A stage at fixed shapes: replays the graph of a bucket, or runs the stage's function without a graph.

    Args:
        function: maps a NamedTuple of tensors [num_reqs, ...] to a NamedTuple of tensors [num_reqs, ...] or None. The
            function must not write to its inputs, wait for the device, or let shapes depend on values.
        padding_row: function that maps a bucket's size to the inputs [1, ...] of a row that has no effect on state or
            on other rows.
        buckets: shapes to capture.

    Raises:
        ValueError: there are no buckets, a bucket is smaller than 1x1, or a padding row does not consist of tensors
            with a single row.
    """

    def __init__(
        self,
        stage: Stage,
        function: Callable[[InputsT], OutputsT],
        padding_row: Callable[[int], InputsT],
        buckets: Iterable[Bucket],
        pool: GraphPool,
    ) -> None:
        self.stage = stage
        self.function = function
        self.pool = pool
        self.buckets = tuple(sorted(set(buckets), key=operator.attrgetter("num_rows"), reverse=True))
        if not self.buckets or min(min(bucket.num_reqs, bucket.size) for bucket in self.buckets) < 1:
            raise ValueError(
                f"buckets of {stage} are [{', '.join(map(str, self.buckets))}]: use at least one, from 1x1"
            )
        self._padding = {size: padding_row(size) for size in {bucket.size for bucket in self.buckets}}
        for row in self._padding.values():
            _check_rows(stage, "padding row", row, 1)
        self._inputs = self._allocate()
        self._graphs: dict[Bucket, _Captured] = {}

    def inputs(self, bucket: Bucket) -> InputsT:
        """Returns a bucket's static inputs, for callers that write the inputs in place and then call `replay`.

        All buckets' inputs share memory.
        """
        if bucket not in self._inputs:
            raise ValueError(f"{self.stage} has no bucket {bucket}: it has {', '.join(map(str, self.buckets))}")
        return self._inputs[bucket]

    @property
    def has_graphs(self) -> bool:
        """Whether any bucket was captured."""
        return bool(self._graphs)

    @torch.inference_mode()
    def capture(self, bucket: Bucket) -> Exception | None:
        """Captures one bucket on padding inputs.

        If capturing fails, the exception is returned and recorded in the pool's statistics.

        Raises:
            BackendLost: the capturing backend is lost.
        """
        static, device = self.inputs(bucket), self.pool.device
        for view, row in zip(static, self._padding[bucket.size], strict=True):
            view.copy_(row)

        def call() -> OutputsT:
            return self.function(static)

        def marked() -> OutputsT:
            self.pool.mark("begin")
            return call()

        _check_rows(self.stage, "output", device.warm_up(call), bucket.num_reqs)
        try:
            with self.pool.marking() as marks:
                captured = device.capture(marked, self.pool.handle)
            self._graphs[bucket] = _Captured(*captured, marks if marks.is_timed else None)
        except BackendLost:
            raise
        except Exception as error:
            self.pool.note_failure(self.stage, bucket, error)
            return error
        self.pool.stats.captured.append((self.stage, bucket))
        return None

    @torch.inference_mode()
    def run(self, bucket: Bucket, inputs: InputsT) -> OutputsT:
        """Computes the stage for `inputs`, padded to the bucket.

        Args:
            inputs: [num_reqs, ...] with at most `bucket.num_reqs` rows; other dimensions may also be smaller than the
                bucket's. Pinned host tensors are copied asynchronously, and must not change before the copy is done.

        Returns:
            The first num_reqs rows of the outputs; valid until any graph of the pool is replayed.

        Raises:
            ValueError: there is no such bucket, or the inputs do not fit into the bucket; the message names the field.
        """
        static = self.inputs(bucket)
        num_reqs = inputs[0].shape[0]
        for name, source, view, row in zip(static._fields, inputs, static, self._padding[bucket.size], strict=True):
            rows, *rest = source.shape
            fits = source.dim() == view.dim() and all(map(operator.le, rest, view.shape[1:]))
            if not fits or rows != num_reqs or rows > bucket.num_reqs:
                raise ValueError(
                    f"{name} of {self.stage} has shape {list(source.shape)} where {static._fields[0]} has {num_reqs} "
                    f"rows: bucket {bucket} takes at most {list(view.shape)}"
                )
            if source.shape == view.shape:
                view.copy_(source, non_blocking=True)
                continue
            view.copy_(row)
            view[tuple(slice(n) for n in source.shape)].copy_(source, non_blocking=True)
        return self.replay(bucket, num_reqs)

    @torch.inference_mode()
    def replay(self, bucket: Bucket, num_reqs: int) -> OutputsT:
        """Computes the stage for the values in `inputs(bucket)`; returns the outputs as `run` does."""
        captured, stats = None if self.pool.paused else self._graphs.get(bucket), self.pool.stats
        if captured is None:
            outputs = self.function(self.inputs(bucket))
            stats.count_eager_run(self.stage)
        else:
            if captured.marks is not None:
                self.pool.measure(captured.marks)
                captured.marks.is_pending = True
            self.pool.device.replay(captured.graph)
            outputs = captured.outputs
            stats.count_replay(self.stage)
        return type(outputs)(*(None if part is None else part[:num_reqs] for part in outputs))

    @torch.inference_mode(mode=False)
    def _allocate(self) -> dict[Bucket, InputsT]:
        """Allocates one buffer per field for the largest bucket; returns contiguous views for every bucket."""
        rows = next(iter(self._padding.values()))
        buffers = [
            row.new_empty(max(b.num_reqs * self._padding[b.size][index].numel() for b in self.buckets))
            for index, row in enumerate(rows)
        ]

        def view(buffer: Tensor, row: Tensor, num_reqs: int) -> Tensor:
            return buffer[: num_reqs * row.numel()].view(num_reqs, *row.shape[1:])

        return {
            bucket: type(rows)(
                *(
                    view(buffer, row, bucket.num_reqs)
                    for buffer, row in zip(buffers, self._padding[bucket.size], strict=True)
                )
            )
            for bucket in self.buckets
        }


def _check_rows(stage: Stage, what: str, fields: tuple, num_rows: int) -> None:
    if not hasattr(fields, "_fields"):
        raise ValueError(f"{what} of {stage} is a {type(fields).__name__}: it must be a NamedTuple of tensors")
    for name, part in fields._asdict().items():
        absent = part is None and what == "output"
        if not absent and not (isinstance(part, Tensor) and part.dim() and part.shape[0] == num_rows):
            found = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"{what} {name} of {stage} is {found}: it must be a tensor of {num_rows} rows")


def _root(error: BaseException) -> BaseException:
    # Ending an invalid capture also raises; the original error is then the cause or context of that second error.
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def first_cause(error: BaseException) -> str:
    """Returns the first line of the error that caused `error`."""
    error = _root(error)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _with_progress(jobs: list[tuple[GraphRunner, Bucket]]) -> Iterator[tuple[GraphRunner, Bucket]]:
    """Yields the jobs, with a progress bar if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield from jobs
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("CUDA graphs", total=len(jobs))
        for runner, bucket in jobs:
            progress.update(task, description=f"CUDA graph {runner.stage} {bucket}")
            yield runner, bucket
            progress.advance(task)
