"""Memory of each process of `wingbeat serve` before its first request, for the demo and for a model.

    .venv/bin/python benchmarks/memory.py [--model FOLDER] [-- OPTIONS OF wingbeat serve]

Proportional set sizes (PSS, /proc/PID/smaps_rollup): a page shared by several processes is divided among them, so that
the sum is the memory that the machine lacks.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from report import Report, Table, machine_facts
from servers import answers, free_port

from wingbeat.cluster.process_tree import descendants

ROOT = Path(__file__).resolve().parents[1]
END_S = 90.0
SETTLE_S = 3.0
MIB = 1 << 20
PARTS = (
    ("engine", r"engine\.engine_process"),
    ("drafter: its process", r"fork_server .* forked"),
    ("drafter: what its process is forked from", r"cluster\.fork_server"),
    ("drafter: Ray's actor", r"ray::DrafterActor"),
    ("grammars", r"grammar\.worker"),
    ("router", r"ray::ServeReplica:\S*Router"),
    ("verifier's replica", r"ray::ServeReplica:\S*Verifier"),
    ("Serve's controller", r"ray::ServeController"),
    ("the command", r"wingbeat serve"),
    ("its watchdog", r"deployments\.ray_guard\.watchdog"),
    ("Ray: GCS, raylet", r"gcs_server|raylet/raylet"),
    ("Ray: agents and log monitor", r"Agent|log_monitor"),
    ("Ray: dashboard, monitor of the autoscaler", r"dashboard\.py|monitor\.py"),
    ("Ray: idle workers", r"ray::IDLE"),
)
"""Role of a process: the first pattern found in its command line."""


class Holding(NamedTuple):
    """Memory held by the processes of one role."""

    num: int
    pss_bytes: int


def holdings(root: int) -> dict[str, Holding]:
    """Memory by role, of a process and all its descendants; processes that match no pattern are `other`."""
    nums, sizes = Counter[str](), Counter[str]()
    for pid in (root, *(process.pid for process in descendants(root))):
        try:
            command = _command(pid)
            if command == _command(_parent(pid)):
                command += " forked"
            pss = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        except OSError:
            continue  # the process ended meanwhile
        part = next((name for name, pattern in PARTS if re.search(pattern, command)), "other")
        nums[part] += 1
        sizes[part] += int(pss[1]) * 1024
    return {name: Holding(nums[name], sizes[name]) for name in [*(name for name, _ in PARTS), "other"] if nums[name]}


@contextmanager
def served(checkout: Path, options: list[str], env: Mapping[str, str] | None = None) -> Iterator[tuple[int, float]]:
    """Runs a server of a checkout; yields its process id and the seconds until it answered.

    Raises:
        RuntimeError: the server does not start.
    """
    port = free_port()
    command = [checkout / ".venv" / "bin" / "wingbeat", "serve", "--port", str(port), *options]
    started = time.perf_counter()
    server = subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})})
    try:
        if not answers(server, f"http://127.0.0.1:{port}/health"):
            raise RuntimeError(f"{command[0]} serve does not answer: see the lines above")
        yield server.pid, time.perf_counter() - started
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(END_S)


def measured(checkout: Path, options: list[str]) -> dict[str, Holding]:
    """Memory by role of a server that has started and had no request."""
    with served(checkout, options) as (pid, _):
        time.sleep(SETTLE_S)
        return holdings(pid)


def table(columns: Mapping[str, Mapping[str, Holding]]) -> Table:
    """Table of memory by role and server."""
    names = [name for name, _ in PARTS] + ["other"]
    rows = [
        (name, *(f"{one[name].pss_bytes / MIB:.0f}" if name in one else "-" for one in columns.values()))
        for name in names
        if any(name in one for one in columns.values())
    ]
    sums = [sum(part.pss_bytes for part in one.values()) / MIB for one in columns.values()]
    nums = [sum(part.num for part in one.values()) for one in columns.values()]
    rows.append(("all", *(f"{size:.0f}" for size in sums)))
    rows.append(("processes", *map(str, nums)))
    return Table("Memory before the first request, MiB (PSS)", ("process", *columns), rows)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model to measure in addition to the demo")
    parser.add_argument("--quick", action="store_true", help="measure the demo alone and write no file")
    parser.add_argument("--output", type=Path)
    parser.add_argument("options", nargs="*", help="options of `wingbeat serve` for the model, after --")
    args = parser.parse_args()
    columns = {"demo": measured(ROOT, [])}
    if args.model is not None and not args.quick:
        columns[args.model.name] = measured(ROOT, ["--model", str(args.model), *args.options])
    facts = machine_facts() | {"options": " ".join(args.options) or "none"}
    figures = {name: {part: held._asdict() for part, held in one.items()} for name, one in columns.items()}
    Report("Memory", facts, [table(columns)], figures).finish(args, "memory")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main())
