"""Fields of OpenAI's and of vLLM's schema that are not served, with the values under which they ask for nothing."""

from collections.abc import Callable, Mapping
from typing import Any

IsOff = Callable[[Any], bool]
"""Whether a value asks for nothing, so that a field that is not served may carry it."""


def off(*values: Any) -> IsOff:
    """Accepts null and the given values; 0 and 0.0 are the same, 0 and false are not."""
    return lambda value: value is None or any(_same(value, good) for good in values)


def no_effect(_value: Any) -> bool:
    """Accepts everything: the field cannot change the result."""
    return True


def _same(value: Any, good: Any) -> bool:
    return value == good and (type(value) is type(good) or (_is_number(value) and _is_number(good)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_COMMON: Mapping[str, IsOff] = {
    "length_penalty": off(1),
    "spaces_between_special_tokens": off(True),
    "guided_json": off(),
    "guided_regex": off(),
    "guided_choice": off(),
    "guided_grammar": off(),
    "use_beam_search": off(False),
    "logits_processors": off(),
    "kv_transfer_params": off(),
    "vllm_xargs": off(),
}

COMPLETION: Mapping[str, IsOff] = {
    **_COMMON,
    "suffix": off(""),
    "prompt_embeds": off(),
}

CHAT: Mapping[str, IsOff] = {
    **_COMMON,
    "echo": off(False),
    "best_of": off(1),
    "chat_template": off(),
    "mm_processor_kwargs": off(),
    "functions": off([]),
    "function_call": off("none", "auto"),
    "modalities": off(["text"], []),
    "audio": off(),
    "prediction": off(),
    "verbosity": off("medium"),
    "web_search_options": off(),
    "moderation": off(),
    "service_tier": off("auto", "default"),
    "store": off(False),
    "prompt_cache_key": no_effect,
    "prompt_cache_options": no_effect,
    "prompt_cache_retention": no_effect,
    "safety_identifier": no_effect,
}

MESSAGE: Mapping[str, IsOff] = {
    "function_call": off(),
    "audio": off(),
    "refusal": off(""),
    "annotations": off([]),
}
