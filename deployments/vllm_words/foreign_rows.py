"""What becomes of one option of another server, and of many: taken, left out with a line, or refused with a line."""

import difflib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Given = Mapping[str, Any]
Read = Callable[[str, Any, Given], dict[str, Any]]
"""From an option's name, its value and all options there are, to settings; ValueError says what to write instead."""
Write = Callable[[str], str]
"""From a name to how it is written where the options were."""
_MOST_SHOWN = 80


class Row(NamedTuple):
    """An option of another server."""

    kind: Literal["same", "becomes", "left out", "refused"]
    says: str
    """One line for people; what stands in braces is a setting of ours."""
    read: Read
    flag: bool = False
    """On a command line no value follows it."""
    values: tuple[Any, ...] = ()
    """Those alone that are left out; any, where there are none."""


class Translated(NamedTuple):
    """Settings that stand for options of another server."""

    settings: dict[str, Any]
    notes: list[str]
    """A line for each option that changes nothing."""


class _Written(dict[str, str]):
    def __init__(self, write: Write) -> None:
        self._write = write

    def __missing__(self, name: str) -> str:
        return self._write(name)


def written(text: str, write: Write) -> str:
    """A line with its settings as they are to be written."""
    return text.format_map(_Written(write))


def same(parse: Callable[[Any], Any] = lambda value: value, says: str = "the same") -> Row:
    """A setting of ours has this name; `parse` gives its values for the other server's."""
    return Row("same", says, lambda name, value, given: {name: parsed} if (parsed := parse(value)) is not None else {})


def becomes(says: str, read: Read, flag: bool = False) -> Row:
    """Settings of other names say the same."""
    return Row("becomes", says, read, flag)


def renamed(setting: str, says: str | None = None) -> Row:
    """One setting of another name says the same."""
    return becomes(says or f"{{{setting}}}", lambda name, value, given: {setting: value})


def left_out(why: str, *values: Any, otherwise: str | None = None, flag: bool = False) -> Row:
    """Nothing needs it, where it has one of these values, or any if there are none.

    Args:
        otherwise: what to write in the place of another value.
    """

    def read(name: str, value: Any, given: Given) -> dict[str, Any]:
        if values and value not in values:
            raise ValueError(otherwise or why)
        return {}

    told = "" if not values else " (" + ", ".join(_in_words(value) for value in values) + ")"
    return Row(
        "left out", f"left out{told}: {why}" + (f"; else refused: {otherwise}" if otherwise else ""), read, flag, values
    )


def refused(why: str, *nothing: Any, flag: bool = False) -> Row:
    """Not served, but for values that ask for nothing: those, False and None."""

    def read(name: str, value: Any, given: Given) -> dict[str, Any]:
        if value is False or value in nothing:
            return {}
        raise ValueError(why)

    return Row("refused", f"refused: {why}", read, flag)


def translate(
    values: Given,
    table: Mapping[str, Row],
    where: Write,
    own: Collection[str],
    write: Write = str,
    beside: Given = MappingProxyType({}),
) -> Translated:
    """Settings that stand for options of another server; what is a setting of ours alone passes as it is.

    Args:
        values: by option; None asks for nothing.
        where: from an option's name to how it was written.
        own: names of our settings.
        write: from a setting's name to how it would be written there.
        beside: settings that are given elsewhere, for options that depend on them.

    Raises:
        ValueError: an option is unknown, not served, or contradicts another one; one line that names it.
    """
    settings, notes, said_by = {}, [], {}
    for name, value in values.items():
        row = table.get(name)
        if row is None and name not in own:
            close = difflib.get_close_matches(str(name), [*table, *own], 1)
            raise ValueError(f"{where(name)} is unknown" + (f": did you mean {where(close[0])}?" if close else ""))
        if value is None:
            continue
        try:
            found = {name: value} if row is None else row.read(name, value, {**beside, **values})
        except ValueError as error:
            raise ValueError(f"{where(name)} {shown(value)}: {written(str(error), write)}") from None
        if row is not None and row.kind == "left out":
            notes.append(f"{where(name)} is {written(row.says.partition('; else')[0], write)}")
        for setting, given in found.items():
            if settings.setdefault(setting, given) != given:
                raise ValueError(
                    f"{where(said_by[setting])} and {where(name)} say {shown(settings[setting])} and {shown(given)} of "
                    f"{write(setting)}: give one of them"
                )
            said_by.setdefault(setting, name)
    return Translated(settings, notes)


def shown(value: Any) -> str:
    """A value in an error, at most a line of it."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
