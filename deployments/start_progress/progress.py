"""Prints the progress of a start, with colours and a spinner on a terminal, and repeats phases that take long."""

import re
import threading
import time

from rich.console import Console
from rich.status import Status

from wingbeat.deployments.start_up import StartUp

_PHASE = re.compile(r"\w+ing\b")
"""Pattern of the first word of a line that reports the beginning of a phase ("loading ..."). Other lines report
finished work.
"""
QUIET_S = 15.0
"""Seconds without an event after which running phases are printed again."""


class Progress(StartUp):
    """Prints the progress of a start on standard output; colours and a spinner only on a terminal.

    An event whose first word ends in -ing begins a phase, which lasts until the next event of the same process.

    Args:
        console: console to print on; with None, standard output.
        quiet_s: seconds without an event after which running phases are printed, repeatedly.
    """

    def __init__(self, console: Console | None = None, quiet_s: float = QUIET_S) -> None:
        super().__init__()
        self._console = Console(highlight=False, soft_wrap=True) if console is None else console
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._ended = threading.Event()
        self._phases: dict[str, tuple[str, float]] = {}
        """For each process: the running phase, and the time at which the phase began."""
        self._quiet_s = quiet_s
        self._pulse: threading.Thread | None = None

    def event(self, text: str, process: str = "") -> None:
        """Prints an event; on a terminal, the event also stays in the status line until the next event."""
        text = text[:1].upper() + text[1:]
        self._phases.pop(process, None)
        if _PHASE.match(text):
            self._phases[process] = text, time.monotonic()
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._say_what_goes_on, name="start-up", daemon=True)
            self._pulse.start()
        if not self._console.is_terminal:
            self._console.print(text, markup=False)
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._console.print(f"[green]·[/] {_escaped(text)}")
        self._status.update(_escaped(text))

    def problem(self, text: str, process: str = "") -> None:
        """Prints a warning or an error to standard error, and ends the process's phase."""
        self._phases.pop(process, None)
        self._errors.print(text, markup=False, style="yellow" if self._errors.is_terminal else None)

    def close(self) -> None:
        """Ends the progress output and restores the terminal."""
        self._ended.set()
        status, self._status = self._status, None
        if status is not None:
            status.stop()

    def write(self, text: str) -> None:
        """Prints a line on standard output."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def _say_what_goes_on(self) -> None:
        """Prints phases that have run for at least `quiet_s` seconds, so that a start is never without output for
        longer.
        """
        while not self._ended.wait(self._quiet_s):
            for text, began_at in self._running_phases():
                seconds = time.monotonic() - began_at
                if seconds < self._quiet_s:
                    continue
                self._say_still(f"{text}: {seconds:.0f} s so far")

    def _running_phases(self) -> list[tuple[str, float]]:
        """Returns the running phases of the application's processes; if there are none, the phase of this process,
        which is waiting.
        """
        phases = dict(self._phases)
        own = phases.pop("", None)
        return list(phases.values()) or ([] if own is None else [own])

    def _say_still(self, text: str) -> None:
        status = self._status
        if status is not None:
            status.update(_escaped(text))
        elif not self._console.is_terminal:
            self.write(text)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
