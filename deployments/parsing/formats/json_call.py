"""Reads one tool call in JSON, `{"name": "f", "arguments": {...}}`, character by character."""

import json
from collections.abc import Collection
from enum import Enum, auto

SPACE = " \t\r\n"
KEYS = ("type", "id", "name", "arguments", "parameters")
"""Keys that models write in a call's object."""


class JsonValue:
    """Finds the end of a JSON value; does not validate the value."""

    def __init__(self) -> None:
        self.complete = False
        """Whether the last character that was read completed the value."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar = False

    def take(self, char: str) -> bool:
        """Reads a character; returns False if the value has ended before this character."""
        if self._in_string:
            self._take_in_string(char)
        elif self._is_scalar:
            return char not in SPACE and char not in ",]}"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth <= 0
        elif self._depth == 0:
            self._is_scalar = True
        return True

    def _take_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.complete = self._depth == 0


class Progress(Enum):
    """State of a call after a character was read."""

    OPEN = auto()
    DONE = auto()
    """The character ended the call."""
    BAD = auto()
    """The object turned out not to be a call."""


class _At(Enum):
    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()


class JsonCall:
    """Incremental reader of a call's JSON object. It provides the call's `name`, once it is known, and the text of the
    arguments.
    """

    def __init__(self, needs_arguments: bool = False) -> None:
        """Makes the reader; with `needs_arguments`, an object without arguments is not a call."""
        self.name: str | None = None
        self.has_arguments = False
        """Whether the arguments have begun."""
        self._needs_arguments = needs_arguments
        self._has_other_keys = False
        self._new = ""
        self._at = _At.START
        self._key = ""
        self._text = ""
        self._value = JsonValue()

    @property
    def known(self) -> bool:
        """Whether the object is certainly a call, and its name is known."""
        return self.name is not None and self.has_arguments

    def take_arguments(self) -> str:
        """Returns the text of the arguments that was added since the last call of this method."""
        new, self._new = self._new, ""
        return new

    def may_become(self, names: Collection[str]) -> bool:
        """Returns whether an object that was cut off may be a call of one of the functions `names`; if `names` is
        empty, of any function.
        """
        if self.name is not None:
            return not names or self.name in names
        if self._at is _At.KEY:
            return not self._has_other_keys and any(f'"{key}"'.startswith(self._text) for key in KEYS)
        if self._at is _At.IN_VALUE and self._key == "name" and names:
            return any(f'"{name}"'.startswith(self._text) for name in names)
        return not self._has_other_keys

    def push(self, char: str) -> Progress:
        """Reads a character; returns the state of the call after this character."""
        if self._at is _At.KEY:
            return self._read_key(char)
        if self._at is _At.IN_VALUE:
            return self._read_value(char)
        if char in SPACE:
            return Progress.OPEN
        match self._at, char:
            case (_At.START, "{"):
                self._at = _At.KEY_OR_END
            case (_At.KEY_OR_END, '"'):
                self._begin(_At.KEY)
                return self._read_key(char)
            case (_At.KEY_OR_END | _At.COMMA, "}"):
                return self._end()
            case (_At.COLON, ":"):
                self._at = _At.VALUE
            case (_At.COMMA, ","):
                self._at = _At.KEY_OR_END
            case (_At.VALUE, _):
                self._begin(_At.IN_VALUE)
                return self._read_value(char)
            case _:
                return Progress.BAD
        return Progress.OPEN

    def _begin(self, at: _At) -> None:
        self._at, self._text, self._value = at, "", JsonValue()

    def _read_key(self, char: str) -> Progress:
        self._value.take(char)
        self._text += char
        if self._value.complete:
            key = _read(self._text)
            if not isinstance(key, str):
                return Progress.BAD
            self._key, self._at = key, _At.COLON
            self._has_other_keys |= key not in KEYS
        return Progress.OPEN

    def _read_value(self, char: str) -> Progress:
        if not self._value.take(char):
            self._at = _At.COMMA
            return self.push(char) if self._close_value() else Progress.BAD
        if self._streams(char):
            self._new += char
            self.has_arguments = True
        else:
            self._text += char
        if self._value.complete:
            self._at = _At.COMMA
            return Progress.OPEN if self._close_value() else Progress.BAD
        return Progress.OPEN

    def _streams(self, char: str) -> bool:
        """Returns whether the current value is the object with the arguments, so that its text is passed on as it
        arrives.
        """
        return self._key in ("arguments", "parameters") and not self._text and (self.has_arguments or char == "{")

    def _close_value(self) -> bool:
        """Processes a complete value; returns False if an object with this value cannot be a call."""
        if not self._text:
            return True
        value = _read(self._text)
        if self._key == "name":
            self.name = value if isinstance(value, str) and value else None
            return self.name is not None
        if self._key in ("arguments", "parameters"):
            # Some models write the arguments as a JSON string; some write null if there are no arguments.
            self._new = value if isinstance(value, str) else "{}" if value is None else self._text
            self.has_arguments = True
        return True

    def _end(self) -> Progress:
        if self.name is None or (self._needs_arguments and not self.has_arguments):
            return Progress.BAD
        if not self.has_arguments:
            self._new, self.has_arguments = "{}", True
        return Progress.DONE


def _read(text: str) -> object:
    """Returns the JSON value; None if the text is not valid JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
