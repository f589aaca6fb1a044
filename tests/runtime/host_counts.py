"""Host work of a steady round, counted on a fake GPU: functions entered, torch operations, launches, uploads.

Times of a round's host work differ by machine and hour; these counts do not. The verifier's thread and the drafter's
thread, which is another process in a deployment, are counted apart; so is the verifier's work between a reply and the
launch of its verification, for which the device waits. As a program (`python -m tests.runtime.host_counts`) it prints
the table of `benchmarks/results/gpu_launches.md`.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from tests.runtime.fake_gpu import CUDA, FakeGpu, fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import TREE, engine_config, new_drafter, verifier
from wingbeat.cluster.channels.channel import InProcessChannel, VerifierSide
from wingbeat.runtime.adaptive import calibration
from wingbeat.runtime.drafters import draft_stages
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import GraphRunner
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round import shapes
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import LoadedModel

BATCHES = (1, 16, 64)
KINDS = ("plain", "adaptive tree")
NUM_ROUNDS, WARM_UP_ROUNDS = 16, 8
"""Rounds that are counted, and rounds before. A KV block holds 16 tokens: each sequence gets one block meanwhile."""
PROMPT = (1, 2, 3)
SIDES = ("verifier", "drafter")
GAP = "verifier, from a reply to its verification"
"""Work of the verifier's thread between a reply and the launch of its verification, while the device is idle."""

LIMITS = {
    ("plain", 1, "verifier"): (140, 23),
    ("plain", 16, "verifier"): (470, 22),
    ("plain", 64, "verifier"): (1526, 22),
    ("adaptive tree", 1, "verifier"): (258, 81),
    ("adaptive tree", 16, "verifier"): (706, 79),
    ("adaptive tree", 64, "verifier"): (2194, 79),
    ("adaptive tree", 1, "drafter"): (78, 151),
    ("adaptive tree", 16, "drafter"): (78, 151),
    ("adaptive tree", 64, "drafter"): (78, 151),
    ("adaptive tree", 1, GAP): (32, 3),
    ("adaptive tree", 16, GAP): (62, 3),
    ("adaptive tree", 64, GAP): (158, 3),
}
"""Largest numbers of functions and operations; a commit that raises one says why. Versions of torch differ."""
LAUNCHES = {
    ("plain", "verifier"): (5, 2, 1),
    ("adaptive tree", "verifier"): (8, 2, 1),
    ("adaptive tree", "drafter"): (4, 1, 1),
    ("adaptive tree", GAP): (1, 0, 0),
}
"""Launches, graphs and uploads, for every batch size."""
SPREAD = {
    ("plain", "verifier"): (23, 10),
    ("adaptive tree", "verifier"): (34, 19),
    ("adaptive tree", "drafter"): (14, 8),
}
"""Largest number of files entered in a steady captured round, and of types of records passed to functions."""

_ROOT = Path(shapes.__file__).parents[2]
_SOURCES = tuple(f"{_ROOT / room}/" for room in ("kernels", "runtime", "cluster"))
_DRAFTER = DraftWorker.run_once.__wrapped__.__code__
_REPLY = VerifierSide.wait_reply.__code__
_LAUNCH = GraphRunner.replay.__wrapped__.__code__


class Counts(NamedTuple):
    """Counts of one side in the busiest of some steady rounds."""

    functions: int
    """Entered functions of Wingbeat; comprehensions are left out, because some versions of Python inline them."""
    operations: int
    """torch operations on host and device, including views."""
    launches: int
    """Requests to the device: kernels and copies; a replayed graph counts as one."""
    graphs: int
    """Replayed graphs, among the launches."""
    uploads: int
    """Copies from host to device among the launches."""


def _is_record(value: object) -> bool:
    """Whether a value is of a named tuple or dataclass of Wingbeat."""
    ours = type(value).__module__.startswith("wingbeat.")
    return ours and (hasattr(value, "_fields") or is_dataclass(value))


class HostCounter:
    """Counts what the host does while entered, by side."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._found: dict[str, Counter[str]] = {side: Counter() for side in (*SIDES, GAP)}
        self._side = SIDES[0]
        self._in_gap = False
        self._within = False
        """Whether an operation is running, whose inner operations are not counted."""
        self.by_function: Counter[CodeType] = Counter()
        self.files: dict[str, set[str]] = {side: set() for side in SIDES}
        """Files entered, by side."""
        self.records: dict[str, set[type]] = {side: set() for side in SIDES}
        """Wingbeat's named tuples and dataclasses that were passed to functions, by side."""

    def counts(self) -> dict[str, Counts]:
        """Counts by side."""
        return {side: Counts(*(found[name] for name in Counts._fields)) for side, found in self._found.items()}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeGpu, "__torch_dispatch__", self._dispatch(FakeGpu.__torch_dispatch__))
            patch.setattr(FakeGpu, "_upload", self._upload(FakeGpu._upload))
            before = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(before)
                self._take_launches()

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code is _DRAFTER and event in ("call", "return"):
            self._take_launches()
            self._side = SIDES[event == "call"]
        elif (code is _REPLY and event == "return") or (code is _LAUNCH and event == "call"):
            self._take_launches()
            self._in_gap = code is _REPLY and arg is not None
        if event == "call" and code.co_filename.startswith(_SOURCES) and not code.co_name.startswith("<"):
            self._add("functions")
            self.by_function[code] += 1
            self.files[self._side].add(code.co_filename)
            given = (frame.f_locals[name] for name in code.co_varnames[: code.co_argcount])
            self.records[self._side] |= {type(value) for value in given if _is_record(value)}

    def _add(self, name: str, count: int = 1) -> None:
        self._found[self._side][name] += count
        if self._in_gap:
            self._found[GAP][name] += count

    def _dispatch(self, dispatch: Any) -> Any:
        def counted(mode: FakeGpu, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if self._within:
                return dispatch(mode, func, types, args, kwargs)
            self._add("operations")
            self._within = True
            try:
                return dispatch(mode, func, types, args, kwargs)
            finally:
                self._within = False

        return counted

    def _upload(self, upload: Any) -> Any:
        def counted(mode: FakeGpu, source: Any) -> None:
            self._add("uploads")
            upload(mode, source)

        return counted

    def _take_launches(self) -> None:
        launches = self._gpu.launches
        self._add("launches", launches.total())
        self._add("graphs", launches["graph"])
        launches.clear()


def steady_engine(gpu: FakeGpu, loaded: LoadedModel, kind: str, batch: int) -> Engine:
    """Engine in which as many greedy requests as there are slots have decoded for some rounds."""
    shape = TREE if kind == "plain" else replace(TREE, adaptive=True)
    config = engine_config(shape, batch, max_num_batched_tokens=256, num_kv_blocks=10 * batch, cuda_graphs=True)
    drafter = None if kind == "plain" else new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    with pytest.MonkeyPatch.context() as patch:
        # All rounds have this many sequences; capturing and timing other batch sizes would take most of the time.
        patch.setattr(shapes, "batch_buckets", lambda most: (most,))
        patch.setattr(draft_stages, "draft_batches", lambda most, max_path, top_k: (most,))
        patch.setattr(calibration, "POINTS", 2)
        channel = partial(InProcessChannel, device=CUDA)
        engine = build_engine(loaded, config, drafter, channel, FakeGraphDevice(gpu))
    # Without values the policy never learns that drafts pay.
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True, force_drafts=kind != "plain")
    for index in range(batch):
        engine.add_request(Request(str(index), PROMPT, params))
    while len([seq for seq in engine.scheduler.running if seq.is_decoding]) < batch:
        engine.step()
    for _ in range(WARM_UP_ROUNDS):
        engine.step()
    return engine


def busiest_round(gpu: FakeGpu, loaded: LoadedModel, kind: str, batch: int) -> dict[str, Counts]:
    """Largest of each count over some steady rounds, by side."""
    engine = steady_engine(gpu, loaded, kind, batch)
    gpu.strict = True
    most = {side: Counts(0, 0, 0, 0, 0) for side in (*SIDES, GAP)}
    for _ in range(NUM_ROUNDS):
        counter = HostCounter(gpu)
        gpu.launches.clear()
        with counter():
            outputs = engine.step()
        assert len(outputs) == batch, "every sequence decodes in every round"
        most = {side: Counts(*map(max, most[side], found)) for side, found in counter.counts().items()}
    gpu.strict = False
    engine.model.remove_taps()
    return most


def spread_of(gpu: FakeGpu, loaded: LoadedModel, kind: str) -> dict[str, tuple[set[str], set[type]]]:
    """Files and types of records in some steady rounds of one sequence, by side."""
    engine, counter = steady_engine(gpu, loaded, kind, 1), HostCounter(gpu)
    with counter():
        for _ in range(NUM_ROUNDS):
            engine.step()
    engine.model.remove_taps()
    return {side: (counter.files[side], counter.records[side]) for side in SIDES if counter.files[side]}


def count_all(gpu: FakeGpu, batches: Sequence[int] = BATCHES) -> dict[tuple[str, int, str], Counts]:
    """Counts by kind of round, batch size and side; sides without work are left out."""
    loaded = verifier()
    return {
        (kind, batch, side): found
        for kind in KINDS
        for batch in batches
        for side, found in busiest_round(gpu, loaded, kind, batch).items()
        if any(found)
    }


def main() -> int:
    """Print the table."""
    if (reason := why_not()) is not None:
        print(f"host_counts: no fake GPU: {reason}", file=sys.stderr)
        return 1
    with fake_gpu() as gpu:
        found = count_all(gpu)
        spread = {kind: spread_of(gpu, verifier(), kind) for kind in KINDS}
    print(f"| round, sequences | side | {' | '.join(Counts._fields)} |\n|---|---|{'---:|' * len(Counts._fields)}")
    for (kind, batch, side), counts in found.items():
        print(f"| {kind}, {batch} | {side} | {' | '.join(map(str, counts))} |")
    for kind, of_sides in spread.items():
        for side, (files, records) in of_sides.items():
            print(f"\n{kind}, {side}: {len(files)} files, {len(records)} types of records")
            print(*sorted(name.removeprefix(f"{_ROOT}/") for name in files), sep="\n")
            print(*sorted(f"{one.__module__}.{one.__qualname__}" for one in records), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
