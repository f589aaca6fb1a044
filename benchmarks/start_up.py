"""Time until `wingbeat serve` answers, and the memory of its processes then.

Optionally compared with another checkout.
"""

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from report import RESULTS, Report, Table, machine_facts, middle, spread
from servers import answers, free_port

from wingbeat.cluster.process_tree import descendants

ROOT = Path(__file__).resolve().parents[1]
END_S = 60.0


class Start(NamedTuple):
    """Measurement of one start."""

    ready_s: float
    memory_mib: float
    """Resident memory of all its processes in MiB; shared pages count once per process."""


def start_once(checkout: Path, options: list[str]) -> Start:
    """Starts the application of a checkout, waits until `/health` succeeds, and stops it.

    Raises:
        RuntimeError: the server ended, or did not answer in time.
    """
    port = free_port()
    command = [checkout / ".venv" / "bin" / "wingbeat", "serve", "--port", str(port), *options]
    started = time.perf_counter()
    server = subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not answers(server, f"http://127.0.0.1:{port}/health"):
            raise RuntimeError(f"{command[0]} serve does not answer: run it by hand to see why")
        ready_s = time.perf_counter() - started
        pids = [server.pid, *(process.pid for process in descendants(server.pid))]
        return Start(ready_s, sum(map(resident_mib, pids)))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(END_S)


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", type=Path, help="another checkout with its own .venv, started in turn with this one")
    parser.add_argument("--quick", action="store_true", help="one start; measures nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "start_up.json")
    parser.add_argument("options", nargs="*", help="options of `wingbeat serve`, after --")
    args = parser.parse_args()
    checkouts = {"this checkout": ROOT} | ({"the other one": args.other.resolve()} if args.other else {})
    repeats = 1 if args.quick else args.repeats
    for checkout in checkouts.values():
        start_once(checkout, args.options)  # warm-up: leaves compiled code and measurements on disk
    starts: dict[str, list[Start]] = {name: [] for name in checkouts}
    for _ in range(repeats):
        for name, checkout in checkouts.items():
            starts[name].append(start_once(checkout, args.options))
    rows = []
    for name, found in starts.items():
        memory = middle([start.memory_mib for start in found])
        rows.append((name, spread([start.ready_s for start in found]), f"{memory:.0f}"))
    columns = ("", "ready after, s", "resident, MiB")
    table = Table("`wingbeat serve`, warm", columns, rows, f"medians of {repeats}, in turn")
    facts = machine_facts() | {"options": " ".join(args.options) or "none"}
    figures = {name: [start._asdict() for start in found] for name, found in starts.items()}
    report = Report("Start", facts, [table], figures)
    report.show()
    report.save(args.output)


if __name__ == "__main__":
    main()
