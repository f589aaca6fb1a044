"""Fields of OpenAI's and of vLLM's schema that are not served: what becomes of a request that has one, and why.

A hint cannot change the text and is accepted. What can be left undone without another text than was asked for being
taken for the right one is passed over by name. The rest is refused: the answer would be a wrong one, and nobody told.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from wingbeat.deployments.api.bodies.ignored_fields import ignored_fields
from wingbeat.deployments.api.errors import unsupported

IsOff = Callable[[Any], bool]
"""Whether a value asks for nothing, so that a field that is not served may carry it."""


class Unserved(NamedTuple):
    """What becomes of a field."""

    why: str
    is_off: IsOff
    is_refused: bool = False
    """Where it asks for something; otherwise it is passed over by name."""


def refused(why: str, *values: Any) -> Unserved:
    """400, unless it is null or one of the values: without it the answer would be another one than was asked for."""
    return Unserved(why, _off(values), is_refused=True)


def passed_over(why: str, *values: Any) -> Unserved:
    """Named as ignored, unless it is null or one of the values."""
    return Unserved(why, _off(values))


def hint(why: str) -> Unserved:
    """Accepted whatever it says: it cannot change the text."""
    return Unserved(why, lambda _value: True)


def check_unserved(fields: Mapping[str, Any], table: Mapping[str, Unserved], path: str = "") -> None:
    """Pass over the fields that are not served.

    Raises:
        ApiError: 400 naming the first that asks for something that cannot be left out, or is refused by setting.
    """
    for name, rule in table.items():
        value = fields.get(name)
        if rule.is_off(value):
            continue
        where = f"{path}.{name}" if path else name
        if rule.is_refused or ignored_fields().refuses:
            raise unsupported(where, rule.why)
        ignored_fields().name(where)


def _off(values: tuple[Any, ...]) -> IsOff:
    """Accepts null and the given values; 0 and 0.0 are the same, 0 and false are not."""
    return lambda value: value is None or any(_same(value, good) for good in values)


def _same(value: Any, good: Any) -> bool:
    return value == good and (type(value) is type(good) or (_is_number(value) and _is_number(good)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OLD_FORM = "'structured_outputs' has taken its place"
_NO_STATE = "nothing is kept between requests"
_NO_AUDIO = "answers are text"
_CHECKS = "a client that asks for checks would take what is unchecked for checked"

_COMMON: Mapping[str, Unserved] = {
    "length_penalty": refused("it belongs to beam search", 1),
    "spaces_between_special_tokens": refused("the text would have other spaces", True),
    "guided_json": refused(_OLD_FORM),
    "guided_regex": refused(_OLD_FORM),
    "guided_choice": refused(_OLD_FORM),
    "guided_grammar": refused(_OLD_FORM),
    "use_beam_search": refused("tokens are sampled, or the likeliest", False),
    "logits_processors": refused("code of a client is not run"),
    "kv_transfer_params": refused("whoever splits prompt and answer between servers waits for the like in the answer"),
    "vllm_xargs": refused("they are arguments of a server's own plugins"),
}

COMPLETION: Mapping[str, Unserved] = {
    **_COMMON,
    "suffix": refused("no text is written between two others", ""),
    "prompt_embeds": refused("a prompt is text or tokens"),
}

CHAT: Mapping[str, Unserved] = {
    **_COMMON,
    "echo": refused("an answer of a chat is the answer alone", False),
    "best_of": refused("choices are not ranked", 1),
    "chat_template": refused("the prompt would be another one"),
    "mm_processor_kwargs": refused("the images would be others"),
    "functions": refused("'tools' has taken its place", []),
    "function_call": refused("'tool_choice' has taken its place", "none", "auto"),
    "modalities": refused(_NO_AUDIO, ["text"], []),
    "audio": refused(_NO_AUDIO),
    "moderation": refused(_CHECKS),
    "verbosity": passed_over("no chat template reads it", "medium"),
    "web_search_options": passed_over("tools of other services are not run here"),
    "prediction": hint("a guess at the answer saves time, and changes no token"),
    "service_tier": hint("all requests are served alike"),
    "store": hint(_NO_STATE),
    "prompt_cache_key": hint("prefixes are cached anyway"),
    "prompt_cache_options": hint("prefixes are cached anyway"),
    "prompt_cache_retention": hint("prefixes are cached anyway"),
    "safety_identifier": hint("it says who asks"),
}

MESSAGE: Mapping[str, Unserved] = {
    "function_call": refused("'tool_calls' has taken its place"),
    "audio": refused("it stands for words that only another service has kept"),
    "refusal": refused("no chat template reads it: make it the content", ""),
    "annotations": passed_over("no chat template reads them", []),
}

RESPONSE: Mapping[str, Unserved] = {
    "previous_response_id": refused(f"{_NO_STATE}: send the whole input"),
    "conversation": refused(f"{_NO_STATE}: send the whole input"),
    "background": refused(f"{_NO_STATE}, so that nobody could fetch the response", False),
    "background_options": refused(_NO_STATE),
    "prompt": refused(f"{_NO_STATE}: send its text"),
    "top_logprobs": refused("log-probabilities are told in chat completions", 0),
    "moderation": refused(_CHECKS),
    "access_programs": refused("no such programs are known here"),
    "image": refused(_NO_AUDIO),
    "context_management": passed_over("an input that is too long is refused, not shortened", []),
    "truncation": passed_over("an input that is too long is refused, not shortened", "disabled"),
    "store": hint(_NO_STATE),
    "service_tier": hint("all requests are served alike"),
    "max_tool_calls": hint("it counts calls of hosted tools, of which there are none"),
    "client_metadata": hint("it says who asks"),
    "prompt_cache_key": hint("prefixes are cached anyway"),
    "prompt_cache_options": hint("prefixes are cached anyway"),
    "prompt_cache_retention": hint("prefixes are cached anyway"),
    "safety_identifier": hint("it says who asks"),
}

ANTHROPIC_PROMPT: Mapping[str, Unserved] = {
    "cache_control": hint("prefixes are cached anyway"),
    "mcp_servers": passed_over("tools of other services are not run here", []),
    "context_management": passed_over("a prompt that is too long is refused, not shortened"),
    "container": passed_over("tools of other services are not run here"),
    "speed": hint("all requests are served alike"),
    "diagnostics": passed_over("the answer has 'metrics'"),
    "user_profile_id": hint("it says who asks"),
    "workspace_id": hint("it says who asks"),
}

ANTHROPIC_MESSAGE: Mapping[str, Unserved] = {
    **ANTHROPIC_PROMPT,
    "service_tier": hint("all requests are served alike"),
    "inference_geo": refused("where texts are computed is a promise that this server cannot give"),
}
