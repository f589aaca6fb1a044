"""What a start says: one line per event, in plain words, whichever process the event is in.

Ray brings the log lines of all its processes to the one that started the application. Of these, Wingbeat's own are
shown; those of Ray and Serve stay in their files.
"""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status

_OURS = re.compile(r"(?P<level>[A-Z]+) \d{4}-\d\d-\d\d [\d:,]+ wingbeat\.[\w.]+: (?P<text>.*)")
"""A line of `wingbeat.deployments.log`."""
_OUT_OF_MEMORY = re.compile(
    r"\b(?P<num>[1-9]\d*) worker[^,.]* killed due to (?:memory pressure|the node running low)", re.I
)
"""What of a raylet's lines concerns an operator: it has killed processes itself. Of each that somebody else has ended,
as this application does on purpose, it says that memory may have been the cause."""

_PHASE = re.compile(r"\w+ing\b")
"""How a line begins that says what goes on from now on; other lines say what has happened."""
QUIET_S = 15.0


class StartUp:
    """The terminal, or whatever the standard output of `wingbeat serve` is: there without colours and spinner.

    Args:
        console: None makes one of the standard output.
        quiet_s: after so long without an event, and again and again, it is said what is still going on.
    """

    def __init__(self, console: Console | None = None, quiet_s: float = QUIET_S) -> None:
        self._console = Console(highlight=False, soft_wrap=True) if console is None else console
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._started, self._ended = time.monotonic(), threading.Event()
        self._phases: dict[str, tuple[str, float]] = {}
        """By process, the phase that runs in it and when the phase began."""
        self._quiet_s = quiet_s
        self._pulse: threading.Thread | None = None

    def event(self, text: str, process: str = "") -> None:
        """Something has begun or ended; on a terminal the latest one stays below the others until the next.

        Args:
            text: a phase begins with its verb's -ing form, and lasts until the next event of the same process.
            process: where it happens; empty is this process.
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
        """No start is silent for longer than `quiet_s`, whatever takes its time in whichever process."""
        while not self._ended.wait(self._quiet_s):
            for text, began_at in self._running_phases():
                seconds = time.monotonic() - began_at
                if seconds < self._quiet_s:
                    continue
                self._say_still(f"{text}: {seconds:.0f} s so far")

    def _running_phases(self) -> list[tuple[str, float]]:
        """Phases that the application's processes run; where there is none, this process's own phase, which waits."""
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
        """A warning or an error, on the standard error."""
        self._errors.print(text, markup=False, style="yellow" if self._errors.is_terminal else None)

    def worker_lines(self, data: Mapping[str, Any]) -> None:
        """Lines that a process of the application has written, as Ray hands them over."""
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
        """The last block: where it is served, what, a request to try, and what ends it."""
        self.close()
        seconds, width = time.monotonic() - self._started, max(len(name) for name, _ in facts)
        self._console.print(f"\nReady after {seconds:.0f} s. Serving on {url}. {end}", markup=False)
        for name, value in facts:
            self._console.print(f"  {name:<{width}}  {value}", markup=False)
        self._console.print(f"\nTry this:\n  {command}\n", markup=False)
        self._console.file.flush()

    def close(self) -> None:
        """Leave the terminal as it was; harmless a second time."""
        self._ended.set()
        status, self._status = self._status, None
        if status is not None:
            status.stop()


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def ready_facts(reports: Sequence[Mapping[str, Any]], logs: str) -> list[tuple[str, str]]:
    """What `wingbeat.deployments.replica.verifier_replica.Verifier.report` says of each model, for people to read."""
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
    """A request to the server, for a shell: a chat where the model `chats`, else a completion."""
    key = '-H "Authorization: Bearer $WINGBEAT_API_KEY" ' if needs_key else ""
    if chats:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "How do birds stay in the air?"}]'
    else:
        path, asked = "completions", '"prompt": "def main():"'
    body = f'{{"model": "{model}", {asked}, "max_tokens": {128 if chats else 32}}}'
    return f"curl -s {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{body}'"
