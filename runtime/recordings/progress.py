"""Progress of a long run: a bar on a terminal; elsewhere one line per minute, for log files."""

import sys
import time
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_INTERVAL_S = 60.0


class RunProgress:
    """Context manager that shows the progress of a run.

    Args:
        task: name of the run, one word.
        total: number of items of the whole run.
        done: number of items that earlier runs have done.
        enabled: False shows nothing; False in all processes of a run except the first.
    """

    def __init__(self, task: str, total: int, done: int = 0, enabled: bool = True) -> None:
        console = Console(stderr=True)
        self._task, self._total, self._enabled = task, total, enabled
        self._bar = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._shown = self._bar.add_task(task, total=total, completed=done, note="")
        self._begun_with, self._begun_at = done, time.monotonic()
        self._line_at = self._begun_at + LINE_INTERVAL_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def show(self, done: int, note: str) -> None:
        """Shows the number of items done and a note; the call is cheap, because it usually only reads the clock."""
        self._bar.update(self._shown, completed=done, note=note)
        now = time.monotonic()
        last = done >= self._total > self._begun_with
        if self._enabled and self._bar.disable and (now >= self._line_at or last):
            self._line_at = now + LINE_INTERVAL_S
            print(
                f"{self._task} {done}/{self._total}  {note}  {self._left(done, now)} left", file=sys.stderr, flush=True
            )

    def _left(self, done: int, now: float) -> str:
        new = done - self._begun_with
        if new <= 0:
            return "unknown time"
        return str(timedelta(seconds=round((self._total - done) * (now - self._begun_at) / new)))
