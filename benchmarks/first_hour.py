"""Times of a new user's first hour: `make serve` on a fresh clone, later starts, and the memory of the demo.

    .venv/bin/python benchmarks/first_hour.py [--python python3.11] [--starts 3]

The clone has no environment and a cache of its own, as on a machine where Wingbeat never ran; pip's own cache is the
user's. Processor seconds are those of all processes together: on a busy machine they say more than the clock.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from memory import MIB, ROOT, SETTLE_S, holdings, served, table
from report import Report, Table, machine_facts

ASKED = {"install and first start": 120.0, "later start": 15.0}
"""Seconds on two quiet cores with a warm cache of pip's."""
ENGINE_MIB = 512


class Took(NamedTuple):
    """Time of a step."""

    seconds: float
    cpu_s: float


class Watch:
    """Seconds of the clock and of all processes that have ended since it was made."""

    def __init__(self) -> None:
        self._at, self._cpu = time.perf_counter(), _cpu_s()

    def took(self) -> Took:
        """Up to now."""
        return Took(time.perf_counter() - self._at, _cpu_s() - self._cpu)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def install(clone: Path, python: str | None, env: dict[str, str]) -> Took:
    """Runs the installation that `make serve` begins with."""
    watch = Watch()
    given = [] if python is None else [f"PYTHON={python}"]
    subprocess.run(["make", "--silent", ".venv/serving", *given], cwd=clone, env=env, check=True)
    return watch.took()


def start(clone: Path, env: dict[str, str]) -> tuple[Took, dict[str, Any]]:
    """Until `/health` says yes, and what the processes hold then; the processor's seconds have the end in them."""
    watch = Watch()
    with served(clone, [], env) as (pid, seconds):
        time.sleep(SETTLE_S)
        held = holdings(pid)
    return Took(seconds, watch.took().cpu_s), held


def main() -> None:
    """Measure and show; exits with 1 where more was taken than is asked for, unless --quick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="that makes the environment; as `make serve` finds it without")
    parser.add_argument("--starts", type=int, default=3, help="later ones")
    parser.add_argument("--quick", action="store_true", help="one later start of this checkout; nothing is installed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    steps: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory(prefix="wingbeat-first-hour-") as folder:
        # As `make serve` has it: the first process that imports a file compiles it for the others.
        clone, compiles = Path(folder) / "clone", {"PYTHONDONTWRITEBYTECODE": ""}
        env = os.environ | compiles | {"WINGBEAT_CACHE_DIR": f"{folder}/cache"}
        if args.quick:
            clone, env = ROOT, os.environ | compiles
        else:
            subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
            steps["install"] = [install(clone, args.python, env)]
            first, _ = start(clone, env)
            steps["first start"] = [first]
            whole = Took(*(sum(parts) for parts in zip(steps["install"][0], first, strict=True)))
            steps["install and first start"] = [whole]
        later = [start(clone, env) for _ in range(1 if args.quick else args.starts)]
    steps["later start"] = [took for took, _ in later]
    held = later[-1][1]
    rows = [_row(name, one) for name, one in steps.items()]
    times = Table("A first hour", ("step", "seconds", "of processors", "asked"), rows)
    figures = {name: [took._asdict() for took in one] for name, one in steps.items()}
    Report("First hour", machine_facts(), [times, table({"demo": held})], figures).finish(args, "first_hour")
    late = [name for name, most in ASKED.items() if name in steps and max(steps[name]).seconds > most]
    large = held["engine"].pss_bytes > ENGINE_MIB * MIB
    if not args.quick and (late or large):
        raise SystemExit(f"more than is asked for: {', '.join(late + ['memory of the engine'] * large)}")


def _row(name: str, one: list[Took]) -> tuple[str, ...]:
    parts = [" / ".join(f"{value:.1f}" for value in column) for column in zip(*one, strict=True)]
    return (name, *parts, f"{ASKED[name]:.0f}" if name in ASKED else "")


if __name__ == "__main__":
    main()
