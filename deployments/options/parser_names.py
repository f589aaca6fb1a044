"""Parsers of answers by name, or of a user by import path; knows which there are, and imports those of users alone."""

import importlib

BY_TEMPLATE = "auto"
"""In the place of a parser's name: what the chat template says."""

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
REASONING_PARSERS = {
    "qwen3": "thinking:ThinkingParser",
    "glm45": "thinking:ThinkingParser",
    "deepseek_r1": "thinking:OpenThinkingParser",
    "mistral": "thinking:MistralThinkingParser",
    "harmony": "harmony:HarmonyParser",
    "openai_gptoss": "harmony:HarmonyParser",
}
"""Of modules beside `wingbeat.deployments.parsing`'s registry."""


def check_parser(name: str | None, known: dict[str, str], setting: str) -> None:
    """Raises ValueError, as `find_class`, for what is no name, and as an import path leads to no class."""
    if name not in (None, BY_TEMPLATE, *known):
        find_class(str(name), known, setting)


def find_class(path: str, known: dict[str, str], setting: str) -> type:
    """The class at `module:Class`.

    Raises:
        ValueError: it is no such path, or nothing that is a class is there; names the setting.
    """
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(f"{setting} is {path!r}: must be one of {', '.join(known)}, or module:Class of yours")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting} is {path!r}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{setting} is {path!r}: must be a class derived from a parser's")
    return found
