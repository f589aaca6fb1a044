"""What every script here shares: options, the device, timing, and the JSON object it prints.

A script calls `run(__doc__, measure)`. Without a GPU it ends with one line and exit status 2; `--quick` runs it at toy
sizes on whatever device there is, which shows that it runs and measures nothing.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PEER = "--peer"
FAILED = "failed"
"""Of a result's details: by case, what it raised."""
NO_GPU = 2
"""Exit status of a script that found no GPU."""


class Figure(NamedTuple):
    """One measured number."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    """Target; a figure has at most one."""
    at_least: float | None = None


class Result(NamedTuple):
    """What a script measured."""

    facts: dict[str, str]
    """The shapes and the workload, in words."""
    figures: list[Figure]
    details: dict[str, Any] = {}  # noqa: RUF012  (read only)
    """More, for programs."""


class Bench(NamedTuple):
    """Where and how to measure."""

    name: str
    device: torch.device
    quick: bool
    only: tuple[str, ...] = ()
    """Parts of the names of cases to measure; all of them where none are named."""

    def wants(self, case: str) -> bool:
        """Whether to measure a case of this name."""
        return not self.only or any(part in case for part in self.only)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def report(self, result: Result) -> None:
        """Print what is measured so far as one line of JSON; of several lines the last one counts."""
        figures = [figure._asdict() for figure in result.figures]
        rest = {"facts": result.facts, "figures": figures, "details": result.details}
        print(json.dumps({"name": self.name, "quick": self.quick, **rest}), flush=True)

    def median_ms(self, function: Callable[[], object]) -> float:
        """Milliseconds of one call: median of rounds of calls back to back, so that launches overlap the device's work.

        Between CUDA events, or by the host's clock on the CPU.
        """
        rounds, calls = (2, 1) if self.quick else (11, 10)
        for _ in range(3):
            function()
        return statistics.median(self._round_ms(function, calls) / calls for _ in range(rounds))

    def _round_ms(self, function: Callable[[], object], calls: int) -> float:
        on_gpu = self.device.type == "cuda"
        started = time.perf_counter()
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        for _ in range(calls):
            function()
        if not on_gpu:
            return (time.perf_counter() - started) * 1e3
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def copy_bytes_per_s(self) -> float:
        """Bandwidth of a copy within device memory, bytes read and written counted."""
        size = 1 << (20 if self.quick else 32)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * size / (self.median_ms(lambda: target.copy_(source)) / 1e3)

    def matmul_flops_per_s(self) -> float:
        """Rate of a large square product in `dtype`, a multiplication and an addition counted as two."""
        size = 64 if self.quick else 8192
        left, right = (torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        return 2 * size**3 / (self.median_ms(lambda: left @ right) / 1e3)


class Cases:
    """The cases of a script, each reported when it is measured; one that fails costs itself alone.

    Args:
        facts: of all of them.
    """

    def __init__(self, bench: Bench, facts: dict[str, str], details: dict[str, Any] | None = None) -> None:
        self.bench = bench
        self.result = Result(facts, [], {**(details or {}), FAILED: {}})

    def run(self, name: str, measure: Callable[[], Sequence[Figure]]) -> None:
        """Measure one case that is wanted; an error is noted under its name."""
        if not self.bench.wants(name):
            return
        try:
            self.result.figures.extend(measure())
        except Exception as error:
            # What another case meets need not be what this one met: the figures of both are wanted.
            self.result.details[FAILED][name] = f"{type(error).__name__}: {error}"[:1000]
            traceback.print_exc()
        gc.collect()  # a case's engine must not take memory from the next one's
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self.bench.report(self.result)


def run(doc: str, measure: Callable[[Bench], Result]) -> None:
    """Parse the options, measure, print one line of JSON."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes on any device: shows that it runs")
    parser.add_argument(PEER, action="store_true", help="beside other programs too, where the script has any")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="cases whose names hold one of these")
    args = parser.parse_args()
    name = Path(sys.argv[0]).stem
    if not torch.cuda.is_available() and not args.quick:
        print(f"{name}: no CUDA GPU found, nothing measured (--quick runs toy sizes anywhere)", file=sys.stderr)
        raise SystemExit(NO_GPU)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    # Not inference mode: transformers compiles its own generate() on the same weights.
    with torch.no_grad():
        bench = Bench(name, device, args.quick, tuple(args.only))
        result = measure(bench)
        bench.report(result)
    if result.details.get(FAILED):
        raise SystemExit(1)
