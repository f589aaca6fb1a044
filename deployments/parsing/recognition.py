"""Chooses parsers for a model's answers from its chat template.

A model is expected to write calls in the form in which its chat template renders earlier calls. The template is not
run; its text is searched for the marks of known formats.
"""

import re
from typing import NamedTuple

_WIDE = "<\uff5c"
CALL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", (r"<\|channel\|>",)),
    ("deepseek_v3", (f"{_WIDE}tool\u2581calls\u2581begin", "```json")),
    ("deepseek_v31", (f"{_WIDE}tool\u2581calls\u2581begin",)),
    ("kimi_k2", (r"<\|tool_calls_section_begin\|>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", (r"\[TOOL_CALLS\]",)),
    ("hermes", (r"<tool_call>",)),
    ("pythonic", (r"\[\w+\(\w+=",)),
    ("pythonic", (r"<function_calls>",)),
    ("llama3_json", (r"<\|python_tag\|>",)),
    ("llama3_json", (r"\{\s*\\?\"name\\?\":", r"\"parameters\\?\":")),
)
"""Tool-call parsers, each with regular expressions. The chosen parser is the first whose expressions all match the
template.
"""
REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", (r"<\|channel\|>",)),
    ("mistral", (r"\[THINK\]",)),
    ("qwen3", (r"</think>",)),
)
"""Reasoning parsers, with regular expressions as in `CALL_MARKS`."""
_TOOLS = re.compile(r"\btools\b")


class Recognised(NamedTuple):
    """Names of the parsers chosen by a chat template."""

    tool_call_parser: str | None
    reasoning_parser: str | None
    shows_tools: bool
    """Whether the template shows a request's tools to the model."""


def recognise(template: str | None) -> Recognised:
    """Chooses parsers by a chat template; chooses no parsers if there is no template."""
    template = template or ""
    shows_tools = _TOOLS.search(template) is not None
    calls = _first(CALL_MARKS, template) if shows_tools else None
    return Recognised(calls, _first(REASONING_MARKS, template), shows_tools)


def _first(marks: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str | None:
    return next((name for name, all_of in marks if all(re.search(mark, template) for mark in all_of)), None)
