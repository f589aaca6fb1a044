"""Harness of all scripts here: options, device, timing, and the JSON object that is printed.

A script calls `run(__doc__, measure)`. Without a GPU it exits with one line and status 2; `--quick` runs at toy sizes
on any device, which checks that the script works and measures nothing.
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
"""Key of a result's details: errors by case."""
NO_GPU = 2
"""Exit status of a script that found no GPU."""


class Figure(NamedTuple):
    """A measured number."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    """Maximum allowed value; a figure has at most one target."""
    at_least: float | None = None


class Result(NamedTuple):
    """Measurements of a script."""

    facts: dict[str, str]
    """Shapes and workload, as text."""
    figures: list[Figure]
    details: dict[str, Any] = {}  # noqa: RUF012  (read only)
    """Further data, for programs."""


class Bench(NamedTuple):
    """Device and options of a measurement."""

    name: str
    device: torch.device
    quick: bool
    only: tuple[str, ...] = ()
    """Parts of the names of cases to measure; empty measures all."""

    def wants(self, case: str) -> bool:
        """Whether to measure a case of this name."""
        return not self.only or any(part in case for part in self.only)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def report(self, result: Result) -> None:
        """Prints the measurements so far as one line of JSON; the last such line counts."""
        figures = [figure._asdict() for figure in result.figures]
        rest = {"facts": result.facts, "figures": figures, "details": result.details}
        print(json.dumps({"name": self.name, "quick": self.quick, **rest}), flush=True)

    def median_ms(self, function: Callable[[], object]) -> float:
        """Median milliseconds per call, over rounds of back-to-back calls, so that launches overlap the device's work.

        Measured between CUDA events, or by the host's clock on the CPU.
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
        """Bandwidth of a copy within device memory, counting bytes read and written."""
        size = 1 << (20 if self.quick else 32)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * size / (self.median_ms(lambda: target.copy_(source)) / 1e3)

    def matmul_flops_per_s(self) -> float:
        """Rate of a large square product in `dtype`, counting multiplication and addition as two operations."""
        size = 64 if self.quick else 8192
        left, right = (torch.randn(size, size, dtype=self.dtype, device=self.device) for _ in range(2))
        return 2 * size**3 / (self.median_ms(lambda: left @ right) / 1e3)


class Cases:
    """Cases of a script, each reported when it is measured; a failing case does not affect the others.

    Args:
        facts: facts about all cases.
    """

    def __init__(self, bench: Bench, facts: dict[str, str], details: dict[str, Any] | None = None) -> None:
        self.bench = bench
        self.result = Result(facts, [], {**(details or {}), FAILED: {}})

    def run(self, name: str, measure: Callable[[], Sequence[Figure]]) -> None:
        """Measures a case if it is selected; an error is recorded under its name."""
        if not self.bench.wants(name):
            return
        try:
            self.result.figures.extend(measure())
        except Exception as error:
            # Errors of one case need not affect others: all figures that can be measured are wanted.
            self.result.details[FAILED][name] = f"{type(error).__name__}: {error}"[:1000]
            traceback.print_exc()
        gc.collect()  # frees the case's engine before the next one
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()
        self.bench.report(self.result)


def run(doc: str, measure: Callable[[Bench], Result]) -> None:
    """Parses the options, measures, prints one line of JSON."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes on any device: checks that the script works")
    parser.add_argument(PEER, action="store_true", help="also measure other programs, if the script has any")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PART", help="measure only cases whose names contain one of these"
    )
    args = parser.parse_args()
    name = Path(sys.argv[0]).stem
    if not torch.cuda.is_available() and not args.quick:
        print(f"{name}: no CUDA GPU found, nothing measured (--quick runs toy sizes anywhere)", file=sys.stderr)
        raise SystemExit(NO_GPU)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    # no_grad instead of inference mode: transformers compiles its own generate() on the same weights.
    with torch.no_grad():
        bench = Bench(name, device, args.quick, tuple(args.only))
        result = measure(bench)
        bench.report(result)
    if result.details.get(FAILED):
        raise SystemExit(1)
