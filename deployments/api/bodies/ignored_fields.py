"""Fields of a request that mean nothing to this server: passed over and named, or refused where it is strict."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from wingbeat.deployments.api.errors import unknown_parameter

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
        self._refuses = refuses
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
        if self._refuses:
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

    @property
    def refuses(self) -> bool:
        """Whether what this server leaves undone is refused."""
        return self._refuses

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
