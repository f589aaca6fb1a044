"""Which cores a server's processes may use, and how many they do use."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
from contest import Contestant, Outcome
from report import Table, middle
from workload import Prompt


def tree(pid: int, without: list[int]) -> list[psutil.Process]:
    """A process and all below it, but for those processes and all below them."""
    left_out = set(without)
    found, waiting = [], [psutil.Process(pid)]
    while waiting:
        process = waiting.pop()
        if process.pid not in left_out:
            found.append(process)
            waiting += process.children()
    return found


def processor_seconds(processes: list[psutil.Process]) -> float:
    """That they have used so far; of those that have ended, none."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def allowed(processes: list[psutil.Process]) -> str:
    """How many threads may run on which cores, such as "4 on 0, 12 on 0-1"."""
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
    """Cores that a contestant's processes use while it runs.

    Args:
        processes: of its server, as they now are.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self.used: list[float] = []
        """Processor seconds per second of each turn."""

    def over(self, contestant: Contestant) -> Contestant:
        """The same contestant, metered."""

        def run(prompts: list[Prompt], size: int, max_tokens: int) -> Outcome:
            processes = self._processes()
            before, started = processor_seconds(processes), time.perf_counter()
            outcome = contestant.run(prompts, size, max_tokens)
            spent = processor_seconds(processes) - before
            self.used.append(spent / (time.perf_counter() - started))
            return outcome

        return replace(contestant, run=run)

    def row(self, name: str) -> tuple[str, str, str]:
        """Of a table."""
        return name, f"{middle(self.used):.2f}", allowed(self._processes())


def core_table(meters: dict[str, Meter]) -> Table:
    """By contestant; while its servers still run."""
    rows = [meter.row(name) for name, meter in meters.items()]
    note = f"Medians over all turns, of {len(os.sched_getaffinity(0))} cores; the client's own time is not in them."
    return Table("Cores", ("", "used", "threads that may run on which"), rows, note)
