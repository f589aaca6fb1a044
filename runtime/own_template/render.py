"""A request's own chat template is rendered in a process of its own: it can loop for ever, or fill the memory.

Run as a module it is that process: one JSON object on the standard input, one on the standard output.
"""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from wingbeat.runtime.interpreter import module_command, module_environment

MOST_CPU_S = 2
"""CPU time of a rendering."""
MOST_BYTES = 2**28
"""Memory of a rendering, beside what the process takes before it."""
MOST_CHARS = 2**24
"""Of the text that is made."""
MOST_WALL_S = 30.0
"""For which a request waits, its turn and the start of the process included each."""
MOST_AT_ONCE = 2
"""Processes of one router."""

_turns = threading.BoundedSemaphore(MOST_AT_ONCE)
_LIMITS = f"takes more than {MOST_CPU_S} s, {MOST_BYTES // 2**20} MiB or {MOST_CHARS} characters"


def render_apart(
    template: str, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], special_tokens: Mapping[str, Any]
) -> str:
    """The text of a conversation by a template that a caller has sent; arguments as `Tokenizer.render_chat`'s.

    Raises:
        ValueError: the template refuses the messages, is wrong, or takes more than it may.
    """
    asked = {"template": template, "messages": list(messages), "variables": {**special_tokens, **variables}}
    if not _turns.acquire(timeout=MOST_WALL_S):
        raise ValueError(f"other requests' chat templates have kept the server busy for {MOST_WALL_S:g} s")
    try:
        done = subprocess.run(
            module_command("wingbeat.runtime.own_template.render"),
            input=json.dumps(asked).encode(),
            capture_output=True,
            check=False,
            timeout=MOST_WALL_S,
            env=module_environment(),
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the chat template {_LIMITS}") from None
    finally:
        _turns.release()
    if done.returncode or not done.stdout:
        raise ValueError(f"the chat template {_LIMITS}")
    told = json.loads(done.stdout)
    if "problem" in told:
        raise ValueError(f"the chat template {told['problem']}")
    return told["text"]


def main() -> None:
    """Render what is asked for, within the limits, which the kernel holds."""
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = json.loads(sys.stdin.buffer.read())
    _limit()
    try:
        rendered = render_jinja_template(
            conversations=[asked["messages"]], chat_template=asked["template"], **asked["variables"]
        )
        text = rendered[0][0]
        told = {"text": text} if len(text) <= MOST_CHARS else {"problem": _LIMITS}
    except MemoryError:
        told = {"problem": _LIMITS}
    except Exception as error:  # a template computes with what callers send, and raises whatever that leads to
        told = {"problem": f"refuses the messages: {error}"[:1000]}
    sys.stdout.buffer.write(json.dumps(told).encode())


def _limit() -> None:
    with open("/proc/self/statm") as sizes:
        own_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MOST_BYTES,) * 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + MOST_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
