"""Renders a request's own chat template in a separate process, because the template may loop forever or exhaust memory.

The separate process runs this file as a module: it reads a JSON object from standard input and writes a JSON object to
standard output.
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
"""CPU seconds allowed per rendering."""
MOST_BYTES = 2**28
"""Bytes of memory allowed per rendering, in addition to the memory that the process uses before the rendering."""
MOST_CHARS = 2**24
"""Maximum number of characters of the rendered text."""
MOST_WALL_S = 30.0
"""Maximum number of seconds that a request waits in total: first for its turn, then for the process, including the
process's start.
"""
MOST_AT_ONCE = 2
"""Maximum number of rendering processes that a router runs at the same time."""

_turns = threading.BoundedSemaphore(MOST_AT_ONCE)
_LIMITS = f"takes more than {MOST_CPU_S} s, {MOST_BYTES // 2**20} MiB or {MOST_CHARS} characters"


def render_apart(
    template: str, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], special_tokens: Mapping[str, Any]
) -> str:
    """Render a conversation with a template sent by a client; for the arguments see `Tokenizer.render_chat`.

    Raises:
        ValueError: the template raises an error for the messages, is invalid, or exceeds a limit.
    """
    asked = {"template": template, "messages": list(messages), "variables": {**special_tokens, **variables}}
    if not _turns.acquire(timeout=MOST_WALL_S):
        raise ValueError(f"other requests' chat templates kept the server busy for {MOST_WALL_S:g} s")
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
    """Renders the request on standard input, within limits that the kernel enforces."""
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
    except Exception as error:  # a template is sent by a client and can raise any exception
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
