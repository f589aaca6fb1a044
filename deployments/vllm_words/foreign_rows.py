"""Translates options of another server. Each option becomes settings, is left out with a note, or is refused with an
error.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Given = Mapping[str, Any]
Settings = dict[str, Any]
Read = Callable[[Any, Given], Settings]
"""Function (option's value, all given options) -> settings; raises ValueError, whose message states what to write
instead.
"""
Write = Callable[[str], str]
"""Function from the name of an option or setting to its spelling in messages, such as `--max-num-seqs`."""
SAME_NAME = ""
"""Stands for the option's own name among the settings that a function returns."""
_MOST_SHOWN = 80
_SETTING = re.compile(r"\{([a-z_]+)\}")


class Row(NamedTuple):
    """Handling of one option of another server."""

    kind: Literal["same", "becomes", "left out", "refused"]
    description: str
    """Text about the option, for users; a name in braces is a setting of Wingbeat."""
    read: Read
    flag: bool = False
    """Whether the option has no value on a command line."""
    values: tuple[Any, ...] = ()
    """Values for which the option is left out; empty if the option is left out for every value."""


class Translated(NamedTuple):
    """Settings that replace the options of another server."""

    settings: dict[str, Any]
    notes: list[str]
    """A message for each option that is ignored."""


def written(text: str, write: Write) -> str:
    """Returns the text with each setting in braces replaced by its spelling; braces in quoted values are kept."""
    return _SETTING.sub(lambda found: write(found[1]), text)


def settings_named(text: str) -> list[str]:
    """Returns the settings in braces."""
    return _SETTING.findall(text)


def same(parse: Callable[[Any], Any] = lambda value: value, says: str = "the same") -> Row:
    """Returns the row of an option that is a setting of the same name; `parse` converts the value. If the value is
    None, nothing is set.
    """
    return Row("same", says, lambda value, given: {} if (parsed := parse(value)) is None else {SAME_NAME: parsed})


def becomes(says: str, read: Read, flag: bool = False) -> Row:
    """Returns the row of an option that is replaced by settings with other names."""
    return Row("becomes", says, read, flag)


def renamed(setting: str, says: str | None = None) -> Row:
    """Returns the row of an option that is replaced by one setting with another name and the same value."""
    return becomes(says or f"{{{setting}}}", lambda value, given: {setting: value})


def left_out(why: str, *values: Any, otherwise: str | None = None, flag: bool = False) -> Row:
    """Returns the row of an option that is left out for each of `values`, or for every value if `values` is empty.

    Args:
        why: reason for users.
        otherwise: remedy that is shown if the option has a value that is not among `values` and is therefore refused.
        flag: as in `Row`.
    """

    def read(value: Any, given: Given) -> Settings:
        if values and value not in values:
            raise ValueError(otherwise or why)
        return {}

    told = "" if not values else " (" + ", ".join(_in_words(value) for value in values) + ")"
    return Row(
        "left out", f"left out{told}: {why}" + (f"; else refused: {otherwise}" if otherwise else ""), read, flag, values
    )


def refused(why: str, *nothing: Any, flag: bool = False) -> Row:
    """Returns the row of an option that is refused, except if its value is False, None or in `nothing`; the option is
    then ignored.
    """

    def read(value: Any, given: Given) -> Settings:
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
    """Translates options of another server to settings. An option that is not in `table`, but is the name of one of
    Wingbeat's settings, is passed on unchanged.

    Args:
        values: options by name; None counts as not given.
        table: handling of each option.
        where: returns the spelling of an option's name in messages.
        own: names of Wingbeat's settings.
        write: returns the spelling of a setting's name in messages.
        beside: settings that were given elsewhere; the handling of options may depend on them.

    Raises:
        ValueError: an option is unknown, not supported, or contradicts another option; the message is one line that
            names the option.
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
            found = {name: value} if row is None else row.read(value, {**beside, **values})
        except ValueError as error:
            raise ValueError(f"{where(name)} {shown(value)}: {written(str(error), write)}") from None
        if row is not None and row.kind == "left out":
            notes.append(f"{where(name)} is {written(row.description.partition('; else')[0], write)}")
        for read_name, given in found.items():
            setting = name if read_name == SAME_NAME else read_name
            if settings.setdefault(setting, given) != given:
                raise ValueError(
                    f"{where(said_by[setting])} and {where(name)} mean {shown(settings[setting])} and {shown(given)} "
                    f"for {write(setting)}: give one of them"
                )
            said_by.setdefault(setting, name)
    return Translated(settings, notes)


def shown(value: Any) -> str:
    """Returns a value for an error message, cut to 80 characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
