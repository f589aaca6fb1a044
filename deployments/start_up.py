"""Prints the progress of a start: one line for each event in a process of the application.

Ray forwards the log lines of these processes to the process that started the application. Wingbeat's own lines are
shown; lines of Ray and Serve stay in their log files.
"""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status

_OURS = re.compile(r"(?P<level>[A-Z]+) \d{4}-\d\d-\d\d [\d:,]+ wingbeat\.[\w.]+: (?P<text>.*)")
"""Pattern of a line written by `wingbeat.deployments.log`."""
_OUT_OF_MEMORY = re.compile(
    r"\b(?P<num>[1-9]\d*) worker[^,.]* killed due to (?:memory pressure|the node running low)", re.I
)
"""Pattern of the line in which the raylet reports that it has killed processes to free memory. Other lines of the
raylet are not shown, because they are misleading: for each process that was killed, the raylet names lack of memory as
a possible cause, even if this application has killed the process on purpose.
"""

_PHASE = re.compile(r"\w+ing\b")
"""Pattern of the first word of a line that reports the beginning of a phase ("loading ..."). Other lines report
finished work.
"""
QUIET_S = 15.0
"""Seconds without an event after which running phases are printed again."""


class StartUp:
    """Prints the progress of a start on standard output; colours and a spinner only on a terminal.

    Args:
        console: console to print on; with None, standard output.
        quiet_s: seconds without an event after which running phases are printed, repeatedly.
    """

    def __init__(self, console: Console | None = None, quiet_s: float = QUIET_S) -> None:
        self._console = Console(highlight=False, soft_wrap=True) if console is None else console
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._started, self._ended = time.monotonic(), threading.Event()
        self._phases: dict[str, tuple[str, float]] = {}
        """For each process: the running phase, and the time at which the phase began."""
        self._quiet_s = quiet_s
        self._pulse: threading.Thread | None = None

    def event(self, text: str, process: str = "") -> None:
        """Prints an event; on a terminal, the event also stays in the status line until the next event.

        Args:
            text: the event. If its first word ends in -ing, the event begins a phase, which lasts until the next event
                of the same process.
            process: name of the event's process; empty for this process.
        """
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
            self._console.print(text, markup=False)
            self._console.file.flush()

    def problem(self, text: str) -> None:
        """Prints a warning or an error to standard error."""
        self._errors.print(text, markup=False, style="yellow" if self._errors.is_terminal else None)

    def worker_lines(self, data: Mapping[str, Any]) -> None:
        """Shows log lines of a process of the application; `data` is Ray's message with lines, ip and pid."""
        process = f"{data.get('ip', '')} {data.get('pid', '')}"
        for line in data["lines"]:
            ours = _OURS.match(line)
            if ours is not None and ours["level"] in ("INFO", "DEBUG"):
                self.event(ours["text"], process)
            elif ours is not None:
                self._phases.pop(process, None)
                self.problem(f"{ours['level'].capitalize()}: {ours['text']}")
            elif data.get("pid") == "raylet" and (killed := _OUT_OF_MEMORY.search(line)) is not None:
                self.problem(
                    f"Error: Ray has killed {killed['num']} processes because the node's memory was nearly used up: "
                    "lower kv_cache_memory_bytes or num_replicas, or start Ray with a higher RAY_memory_usage_threshold"
                )

    def ready(self, url: str, facts: Sequence[tuple[str, str]], command: str, end: str = "") -> None:
        """Prints the final lines: address, facts about the model, a command that sends a request, and how to stop the
        server.
        """
        self.close()
        seconds, width = time.monotonic() - self._started, max(len(name) for name, _ in facts)
        self._console.print(f"\nReady after {seconds:.0f} s. Serving on {url}. {end}", markup=False)
        for name, value in facts:
            self._console.print(f"  {name:<{width}}  {value}", markup=False)
        self._console.print(f"\nTry this:\n  {command}\n", markup=False)
        self._console.file.flush()

    def close(self) -> None:
        """Ends the progress output and restores the terminal; may be called twice."""
        self._ended.set()
        status, self._status = self._status, None
        if status is not None:
            status.stop()


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def ready_facts(reports: Sequence[Mapping[str, Any]], logs: str) -> list[tuple[str, str]]:
    """Returns the facts to print, each as name and value, from the verifiers' reports
    (`wingbeat.deployments.replica.verifier_replica.Verifier.report`).
    """
    return [*(fact for report in reports for fact in _facts(report)), ("logs", logs)]


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("model", f"{report['model']} ({report['dtype']} on {report['device']})")]
    test = report["self_test"]
    if test is None:
        facts.append(("drafter", report["drafter"]))
    else:
        facts.append(
            (
                "drafter",
                f"{report['drafter']}: {test['first_position']:.0%} of first drafts accepted in the self-test, "
                f"{test['acceptance_length']:.2f} tokens per draft",
            )
        )
    if report["forced_acceptance"] is not None:
        facts.append(("acceptance", f"forced to {report['forced_acceptance']}: no text is the model's"))
    if report["num_kv_tokens"]:
        facts.append(("KV cache", f"{report['num_kv_tokens']:,} tokens"))
    facts.append(("longest", f"{report['max_model_len']:,} tokens, prompt and answer"))
    return facts


def curl_command(url: str, model: str, needs_key: bool, chats: bool = False) -> str:
    """Returns a shell command that sends a request: a chat request if `chats` is True, else a completion request."""
    key = '-H "Authorization: Bearer $WINGBEAT_API_KEY" ' if needs_key else ""
    if chats:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "How do birds stay in the air?"}]'
    else:
        path, asked = "completions", '"prompt": "def main():"'
    body = f'{{"model": "{model}", {asked}, "max_tokens": {128 if chats else 32}}}'
    return f"curl -s {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{body}'"
