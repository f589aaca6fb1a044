"""Loads parsers by name or by a user's import path. A parser's module is imported only when the parser is used."""

import importlib
from collections.abc import Callable

from wingbeat.deployments.parsing.message import Parser

_PACKAGE = f"{__package__}.formats"
NewParser = Callable[..., Parser]

BY_TEMPLATE = "auto"
"""Value of a parser setting with which the parser is chosen by the chat template."""

TOOL_CALL_PARSERS = {
    "hermes": "hermes:HermesParser",
    "qwen": "hermes:HermesParser",
    "llama3_json": "llama_json:LlamaJsonParser",
    "mistral": "mistral:MistralParser",
    "harmony": "harmony:HarmonyParser",
    "openai": "harmony:HarmonyParser",
    "pythonic": "pythonic:PythonicParser",
    "llama4_pythonic": "pythonic:PythonicParser",
    "olmo3": "pythonic:PythonicParser",
    "deepseek_v3": "deepseek:DeepSeekV3Parser",
    "deepseek_v31": "deepseek:DeepSeekV31Parser",
    "qwen3_coder": "tagged_text:Qwen3CoderParser",
    "qwen3_xml": "tagged_text:Qwen3CoderParser",
    "glm45": "tagged_text:Glm45Parser",
    "glm47": "tagged_text:Glm45Parser",
    "kimi_k2": "marked_json:KimiK2Parser",
}
"""Tool-call parsers by name, as `module:Class` within `formats`."""
REASONING_PARSERS = {
    "qwen3": "thinking:ThinkingParser",
    "glm45": "thinking:ThinkingParser",
    "deepseek_r1": "thinking:OpenThinkingParser",
    "mistral": "thinking:MistralThinkingParser",
    "harmony": "harmony:HarmonyParser",
    "openai_gptoss": "harmony:HarmonyParser",
}
"""Reasoning parsers by name, as `module:Class` within `formats`."""


def load_parser(name: str | None, known: dict[str, str], setting: str) -> NewParser | None:
    """Imports and returns a parser class. `name` is a key of `known` or an import path `module:Class`; with None, the
    result is None.

    Raises:
        ValueError: there is no such parser; the message names the setting.
    """
    if name is None:
        return None
    module, colon, attribute = (f"{_PACKAGE}.{known[name]}" if name in known else name).partition(":")
    if not colon:
        raise ValueError(f"{setting} is {name!r}: must be one of {', '.join(known)}, or your own module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting} is {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Parser)):
        raise ValueError(f"{setting} is {name!r}: must be a class derived from {Parser.__module__}.{Parser.__name__}")
    return found
