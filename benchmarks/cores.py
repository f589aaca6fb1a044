"""Cores that a server's processes may use, and number of cores that they do use."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
from contest import Contestant, Outcome
from report import Table, middle
from workload import Prompt


def tree(pid: int, without: list[int]) -> list[psutil.Process]:
    """A process and all its descendants, except the processes `without` and their descendants."""
    left_out = set(without)
    found, waiting = [], [psutil.Process(pid)]
    while waiting:
        process = waiting.pop()
        if process.pid not in left_out:
            found.append(process)
            waiting += process.children()
    return found


def processor_seconds(processes: list[psutil.Process]) -> float:
    """Processor time used by the processes so far, in seconds; processes that have ended are skipped."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def allowed(processes: list[psutil.Process]) -> str:
    """Describes how many threads may run on which cores, such as "4 on 0, 12 on 0-1"."""
    counts: dict[tuple[int, ...], int] = {}
    for process in processes:
        try:
            threads = [thread.id for thread in process.threads()]
            for thread in threads:
                cores = tuple(sorted(os.sched_getaffinity(thread)))
                counts[cores] = counts.get(cores, 0) + 1
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return ", ".join(f"{count} on {'+'.join(map(str, cores))}" for cores, count in sorted(counts.items()))


class Meter:
    """Measures the cores that a contestant's processes use during its turns.

    Args:
        processes: returns the present processes of the contestant's server.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self.used: list[float] = []
        """Processor seconds per second, by turn."""

    def over(self, contestant: Contestant) -> Contestant:
        """Returns a contestant that also records its processor use here."""

        def run(prompts: list[Prompt], size: int, max_tokens: int) -> Outcome:
            processes = self._processes()
            before, started = processor_seconds(processes), time.perf_counter()
            outcome = contestant.run(prompts, size, max_tokens)
            spent = processor_seconds(processes) - before
            self.used.append(spent / (time.perf_counter() - started))
            return outcome

        return replace(contestant, run=run)

    def row(self, name: str) -> tuple[str, str, str]:
        """Row of the table of cores."""
        return name, f"{middle(self.used):.2f}", allowed(self._processes())


def core_table(meters: dict[str, Meter]) -> Table:
    """Table of the cores used by each contestant; its servers must still be running."""
    rows = [meter.row(name) for name, meter in meters.items()]
    note = f"Medians over all turns, of {len(os.sched_getaffinity(0))} cores; the client's own time is not in them."
    return Table("Cores", ("", "used", "threads that may run on which"), rows, note)
