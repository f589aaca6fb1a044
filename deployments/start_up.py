"""Prints the progress of a start: one line for each event in a process of the application.

Ray forwards the log lines of these processes to the process that started the application. Wingbeat's own lines are
shown; lines of Ray and Serve stay in their log files.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wingbeat.deployments.parts import first_result

_OURS = re.compile(r"(?P<level>[A-Z]+) \d{4}-\d\d-\d\d [\d:,]+ wingbeat\.[\w.]+: (?P<text>.*)")
"""Pattern of a line written by `wingbeat.deployments.log`."""
_OUT_OF_MEMORY = re.compile(
    r"\b(?P<num>[1-9]\d*) worker[^,.]* killed due to (?:memory pressure|the node running low)", re.I
)
"""Pattern of the line in which the raylet reports that it has killed processes to free memory. Other lines of the
raylet are not shown, because they are misleading: for each process that was killed, the raylet names lack of memory as
a possible cause, even if this application has killed the process on purpose.
"""


class StartUp:
    """Prints the progress of a start, a line for each event."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def event(self, text: str, process: str = "") -> None:
        """Prints an event.

        Args:
            process: name of the event's process; empty for this process.
        """
        self.write(text[:1].upper() + text[1:])

    def problem(self, text: str, process: str = "") -> None:
        """Prints a warning or an error to standard error; `process` as for `event`."""
        print(text, file=sys.stderr, flush=True)

    def worker_lines(self, data: Mapping[str, Any]) -> None:
        """Shows log lines of a process of the application; `data` is Ray's message with lines, ip and pid."""
        process = f"{data.get('ip', '')} {data.get('pid', '')}"
        for line in data["lines"]:
            ours = _OURS.match(line)
            if ours is not None and ours["level"] in ("INFO", "DEBUG"):
                self.event(ours["text"], process)
            elif ours is not None:
                self.problem(f"{ours['level'].capitalize()}: {ours['text']}", process)
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
        self.write(f"\nReady after {seconds:.0f} s. Serving on {url}. {end}")
        for name, value in facts:
            self.write(f"  {name:<{width}}  {value}")
        self.write(f"\nTry this:\n  {command}\n")

    def close(self) -> None:
        """Ends the progress output; may be called twice."""

    def write(self, text: str) -> None:
        """Prints a line on standard output."""
        print(text, flush=True)


def new_start_up() -> StartUp:
    """Returns the `StartUp` of a part, if there is one."""
    return first_result("start_up") or StartUp()


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
