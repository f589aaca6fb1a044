"""Handling of request fields that are not supported: unknown fields, and fields of OpenAI's and vLLM's schemas.

Unknown fields are ignored and named in a response header, or refused if `unknown_fields` is `refuse`. Known but
unsupported fields fall into three groups. Hints, which cannot change the text, are accepted. Fields are ignored and
named if the caller can see in the answer that they had no effect. All other fields are refused, because the caller
could not see that the answer is wrong.
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
"""Maximum number of ignored fields that are named for a request; further ignored fields are only counted."""
MOST_NAME_CHARS = 80
WITHOUT_EFFECT = frozenset(
    (
        *("cache_control", "client_metadata", "id", "metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "session_id", "status"),
        *("store", "trace_id", "user", "user_id"),
    )
)
"""Names of fields about callers, billing, storage and caching. None of these fields can change the text, in whatever
object of the body the field occurs.
"""
_NOT_IN_A_HEADER = re.compile(r"[^\w.\[\]?-]", re.ASCII)


class IgnoredFields:
    """Ignored fields of one request.

    Args:
        refuses: whether the first unknown field raises a 400 instead of being recorded.
    """

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self._names: dict[str, None] = {}
        self._num_more = 0

    def pass_over(self, name: str, value: Any, path: str = "", known: frozenset[str] = frozenset()) -> None:
        """Records an unknown field.

        Args:
            value: value of the field; if unknown fields are not refused, a field that is null or empty is not recorded.
            path: path of the object that contains the field.
            known: the object's known fields, for suggestions.

        Raises:
            ApiError: 400, naming the field, if unknown fields are refused.
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
        """Records an ignored field. `remark` is added in parentheses, for example the known field that may have been
        meant.
        """
        if self._is_full:
            self._num_more += 1
        else:
            self._names[_plain(path) + (f" ({_plain(remark)})" if remark else "")] = None

    @property
    def _is_full(self) -> bool:
        return len(self._names) >= MOST_NAMED

    def pass_over_unknown(self, fields: Mapping[str, Any], known: frozenset[str], path: str) -> None:
        """Records all fields of an object that are not in `known`; raises the error of `pass_over`."""
        for name in sorted(fields.keys() - known):
            self.pass_over(name, fields[name], path, known)

    def __str__(self) -> str:
        """Returns the names of the ignored fields and the remarks on them, as a header value; empty if no field was
        ignored.
        """
        more = [f"{self._num_more} more"] if self._num_more else []
        return ", ".join([*self._names, *more])


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("wingbeat_ignored_fields", default=None)


def gather(refuses: bool) -> IgnoredFields:
    """Starts and returns a new collection of ignored fields, for the request that this asyncio task handles."""
    ignored = IgnoredFields(refuses)
    _CURRENT.set(ignored)
    return ignored


def ignored_fields() -> IgnoredFields:
    """Returns the collection of ignored fields of the request that this asyncio task handles."""
    return _CURRENT.get() or IgnoredFields()


@contextmanager
def none_ignored() -> Iterator[None]:
    """Context in which unknown fields are refused, whatever the settings are. Used for operators' requests that change
    the server.
    """
    token = _CURRENT.set(IgnoredFields(refuses=True))
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Part(BaseModel):
    """An object in a request's body; its unknown fields are kept until `drop_unknown` removes them."""

    model_config = ConfigDict(extra="allow", strict=True)

    def unknown(self) -> Mapping[str, Any]:
        """Returns the unknown fields."""
        return self.model_extra or {}


def drop_unknown(part: Part, path: str = "") -> None:
    """Records and drops all unknown fields of a part and of nested parts; raises the error of
    `IgnoredFields.pass_over`.
    """
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
    """Returns the known field that a name probably misspells; None if no known field is similar."""
    return next(iter(get_close_matches(name, known, 1, 0.8)), None)


def _plain(path: str) -> str:
    """Shortens a path, and replaces characters that a header must not contain."""
    path = path if len(path) <= MOST_NAME_CHARS else f"{path[:MOST_NAME_CHARS]}..."
    return _NOT_IN_A_HEADER.sub("?", path)


IsOff = Callable[[Any], bool]
"""Function that takes the value of an unsupported field. Returns whether the value requests nothing and can therefore
be accepted.
"""


class Unserved(NamedTuple):
    """Handling of an unsupported field."""

    why: str
    is_off: IsOff
    is_refused: bool = False
    """Whether a value that requests something is refused; if False, the field is ignored and named."""


def refused(why: str, *values: Any) -> Unserved:
    """Makes the handling that answers 400 unless the value is null or in `values`.

    For fields that must not be ignored, because the answer would then be wrong.
    """
    return Unserved(why, _off(values), is_refused=True)


def passed_over(why: str, *values: Any) -> Unserved:
    """Makes the handling that names the field as ignored unless the value is null or in `values`."""
    return Unserved(why, _off(values))


def hint(why: str) -> Unserved:
    """Makes the handling that accepts any value, because the field cannot change the text."""
    return Unserved(why, lambda _value: True)


def check_unserved(fields: Mapping[str, Any], table: Mapping[str, Unserved], path: str = "") -> None:
    """Handles the unsupported fields of an object by `table`.

    Raises:
        ApiError: 400, names the first field that is refused by the table or by the setting `unknown_fields`.
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
    """Returns the unsupported fields that optional parts of the application declare for the endpoint at `path`, with
    the handling of each field.
    """
    return merged("unserved_fields", path)


def _off(values: tuple[Any, ...]) -> IsOff:
    """Returns a function that is true for null and for the given values; 0 and 0.0 count as equal, 0 and false do
    not.
    """
    return lambda value: value is None or any(_same(value, good) for good in values)


def _same(value: Any, good: Any) -> bool:
    return value == good and (type(value) is type(good) or (_is_number(value) and _is_number(good)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OLD_FORM = "'structured_outputs' has taken its place"
NO_STATE = "nothing is kept between requests"
TEXT_ALONE = "answers are text"
CHECKS = "answers are not moderated here"

_NO_FORM = "this installation has no structured outputs"
_OF_PARTS = {"structured_outputs": refused(_NO_FORM), "response_format": refused(_NO_FORM, {"type": "text"})}
_OF_CHATS = {} if hooks("chat_fields") else {"tools": refused("this installation does not parse tool calls", [])}

COMMON: Mapping[str, Unserved] = {
    **({} if hooks("sampling_fields") else _OF_PARTS),
    "length_penalty": refused("it belongs to beam search", 1),
    "spaces_between_special_tokens": refused("the text would have other spaces", True),
    "guided_json": refused(_OLD_FORM),
    "guided_regex": refused(_OLD_FORM),
    "guided_choice": refused(_OLD_FORM),
    "guided_grammar": refused(_OLD_FORM),
    "use_beam_search": refused("there is no beam search", False),
    "logits_processors": refused("code of a client is not run"),
    "kv_transfer_params": refused("prefill and decode are not split between servers"),
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
    "mm_processor_kwargs": refused("the preprocessing of images and audio cannot be changed"),
    "functions": refused("'tools' has taken its place", []),
    "function_call": refused("'tool_choice' has taken its place", "none", "auto"),
    "modalities": refused(TEXT_ALONE, ["text"], []),
    "audio": refused(TEXT_ALONE),
    "moderation": refused(CHECKS),
    "verbosity": passed_over("no chat template reads it", "medium"),
    "web_search_options": passed_over("tools of other services are not run here"),
    "prediction": hint("a guess at the answer saves time, and changes no token"),
}

MESSAGE: Mapping[str, Unserved] = {
    "function_call": refused("'tool_calls' has taken its place"),
    "audio": refused("it stands for words that only another service has kept"),
    "refusal": refused("no chat template reads it: make it the content", ""),
    "annotations": passed_over("no chat template reads them", []),
}
