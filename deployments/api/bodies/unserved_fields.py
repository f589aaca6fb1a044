"""What becomes of fields that are not served: those that mean nothing, and those of OpenAI's and of vLLM's schema.

One that means nothing is passed over and named, or refused where the server is strict. A hint cannot change the text
and is accepted. What can be left undone without another text than was asked for being taken for the right one is passed
over by name. The rest is refused: the answer would be a wrong one, and nobody told.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from wingbeat.deployments.api.errors import unknown_parameter, unsupported
from wingbeat.deployments.parts import hooks, merged

HEADER = "X-Wingbeat-Ignored-Fields"
MOST_NAMED = 16
"""Fields of one request that are named; the others are counted."""
MOST_NAME_CHARS = 80
WITHOUT_EFFECT = frozenset(
    (
        *("cache_control", "client_metadata", "id", "metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "session_id", "status"),
        *("store", "trace_id", "user", "user_id"),
    )
)
"""Names of hints that cannot change a text wherever they stand: who asks, what to keep or bill, what to cache."""
_NOT_IN_A_HEADER = re.compile(r"[^\w.\[\]?-]", re.ASCII)


class IgnoredFields:
    """Those of one request.

    Args:
        refuses: the first one is answered by 400 instead.
    """

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self._names: dict[str, None] = {}
        self._num_more = 0

    def pass_over(self, name: str, value: Any, path: str = "", known: frozenset[str] = frozenset()) -> None:
        """A field that nothing here reads.

        Args:
            value: null and what is empty ask for nothing, and are not named.
            path: of the object that the field is in.
            known: the fields that could have been meant.

        Raises:
            ApiError: 400 naming the field, where such fields are refused.
        """
        if name in WITHOUT_EFFECT:
            return
        where = f"{path}.{name}" if path else name
        if self.refuses:
            raise unknown_parameter(where)
        if value is None or value in ([], {}):
            return
        near = _near(name, known) if len(name) <= MOST_NAME_CHARS and not self._is_full else None
        self.name(where, f"{near}?" if near else None)

    def name(self, path: str, remark: str | None = None) -> None:
        """Something was ignored; the remark says what it is or could have meant."""
        if self._is_full:
            self._num_more += 1
        else:
            self._names[_plain(path) + (f" ({_plain(remark)})" if remark else "")] = None

    @property
    def _is_full(self) -> bool:
        return len(self._names) >= MOST_NAMED

    def pass_over_unknown(self, fields: Mapping[str, Any], known: frozenset[str], path: str) -> None:
        """The fields of an object that are not among the known ones; raises as `pass_over`."""
        for name in sorted(fields.keys() - known):
            self.pass_over(name, fields[name], path, known)

    def __str__(self) -> str:
        """Their names as a header's value, empty where there are none; each with the field that may have been meant."""
        more = [f"{self._num_more} more"] if self._num_more else []
        return ", ".join([*self._names, *more])


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("wingbeat_ignored_fields", default=None)


def gather(refuses: bool) -> IgnoredFields:
    """Those of the request that this task works for from here on."""
    ignored = IgnoredFields(refuses)
    _CURRENT.set(ignored)
    return ignored


def ignored_fields() -> IgnoredFields:
    """Those of the request that this task works for."""
    return _CURRENT.get() or IgnoredFields()


@contextmanager
def none_ignored() -> Iterator[None]:
    """Within, unknown fields are refused whatever the server's setting: what an operator asks for is kept."""
    token = _CURRENT.set(IgnoredFields(refuses=True))
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Part(BaseModel):
    """An object of a request's body; fields that it does not have are kept until `drop_unknown`."""

    model_config = ConfigDict(extra="allow", strict=True)

    def unknown(self) -> Mapping[str, Any]:
        """Fields that nothing reads."""
        return self.model_extra or {}


def drop_unknown(part: Part, path: str = "") -> None:
    """Pass over all unknown fields of a part and of the parts in it; raises as `IgnoredFields.pass_over`."""
    unknown = part.unknown()
    if unknown:
        ignored_fields().pass_over_unknown(unknown, _names(type(part)), path)
        part.__pydantic_extra__ = {}
    for name, field in type(part).model_fields.items():
        value, where = getattr(part, name), f"{path}.{field.alias or name}" if path else field.alias or name
        if isinstance(value, Part):
            drop_unknown(value, where)
        elif isinstance(value, list) and value and not isinstance(value[0], str | int | list):
            for index, item in enumerate(value):
                if isinstance(item, Part):
                    drop_unknown(item, f"{where}[{index}]")


@cache
def _names(kind: type[Part]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@lru_cache(1024)
def _near(name: str, known: frozenset[str]) -> str | None:
    """The known field that a name is a slip of; None where it is none's."""
    return next(iter(get_close_matches(name, known, 1, 0.8)), None)


def _plain(path: str) -> str:
    """As a header can carry it."""
    path = path if len(path) <= MOST_NAME_CHARS else f"{path[:MOST_NAME_CHARS]}..."
    return _NOT_IN_A_HEADER.sub("?", path)


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


def of_parts(path: str) -> dict[str, Unserved]:
    """Fields that parts know at an endpoint, by its path."""
    return merged("unserved_fields", path)


def _off(values: tuple[Any, ...]) -> IsOff:
    """Accepts null and the given values; 0 and 0.0 are the same, 0 and false are not."""
    return lambda value: value is None or any(_same(value, good) for good in values)


def _same(value: Any, good: Any) -> bool:
    return value == good and (type(value) is type(good) or (_is_number(value) and _is_number(good)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OLD_FORM = "'structured_outputs' has taken its place"
NO_STATE = "nothing is kept between requests"
TEXT_ALONE = "answers are text"
CHECKS = "a client that asks for checks would take what is unchecked for checked"

_NO_FORM = "nothing here holds answers to a form"
_OF_PARTS = {"structured_outputs": refused(_NO_FORM), "response_format": refused(_NO_FORM, {"type": "text"})}
_OF_CHATS = {} if hooks("chat_fields") else {"tools": refused("no calls are read in answers", [])}

COMMON: Mapping[str, Unserved] = {
    **({} if hooks("sampling_fields") else _OF_PARTS),
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
    **COMMON,
    "suffix": refused("no text is written between two others", ""),
    "prompt_embeds": refused("a prompt is text or tokens"),
}

CHAT: Mapping[str, Unserved] = {
    **COMMON,
    **_OF_CHATS,
    "echo": refused("an answer of a chat is the answer alone", False),
    "best_of": refused("choices are not ranked", 1),
    "mm_processor_kwargs": refused("images and audio would be others"),
    "functions": refused("'tools' has taken its place", []),
    "function_call": refused("'tool_choice' has taken its place", "none", "auto"),
    "modalities": refused(TEXT_ALONE, ["text"], []),
    "audio": refused(TEXT_ALONE),
    "moderation": refused(CHECKS),
    "verbosity": passed_over("no chat template reads it", "medium"),
    "web_search_options": passed_over("tools of other services are not run here"),
    "prediction": hint("a guess at the answer saves time, and changes no token"),
    "service_tier": hint("all requests are served alike"),
    "store": hint(NO_STATE),
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
