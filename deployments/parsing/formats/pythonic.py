"""Parser of tool calls in Python syntax, in the forms of Llama and of OLMo.

Llama: `[f(a=1, b="x"), g()]` as the whole answer. OLMo: one call per line between `<function_calls>` and its end tag.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, Self

from wingbeat.deployments.parsing.call_format import Function
from wingbeat.deployments.parsing.formats.call_text import CallParser
from wingbeat.deployments.parsing.formats.json_call import SPACE
from wingbeat.deployments.parsing.formats.typed_text import ArgumentTypes, quoted
from wingbeat.deployments.parsing.message import unfinished

TAGS = ("<|python_start|>", "<|python_tag|>")
"""Special tokens that may come before a list of calls."""
BLOCK, BLOCK_END = "<function_calls>", "</function_calls>"
LIST_ENDS = ("]<|python_end|>", "]")
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_KEY = re.compile(r"[A-Za-z_]\w{0,127}")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words for Python's True, False and None; models sometimes write JSON's words in Python calls."""


class PythonicParser(CallParser):
    """Parser of calls in the forms of Llama and of OLMo. Text outside of calls is answer text; so is a call of a
    function that the request does not define.
    """

    def __init__(self) -> None:
        super().__init__()
        self._types = ArgumentTypes()
        self._ends: tuple[str, ...] = LIST_ENDS
        self._name = ""
        self._num_arguments = 0
        self._scan = _Scan()

    def set_functions(self, functions: Sequence[Function]) -> Self:
        """See `Parser`."""
        self._types = ArgumentTypes(functions)
        return self

    def _drop_rest(self) -> bool:
        """Drops the rest of a malformed call, because the rest is neither a call nor answer text."""
        self._pending = ""
        return False

    def _read_start(self) -> bool:
        rest = self._pending.lstrip()
        tag = next((tag for tag in TAGS if rest.startswith(tag)), "")
        behind = rest[len(tag) :].lstrip() if tag else rest
        if not self._ended and (not behind or any(mark.startswith(rest) for mark in TAGS)):
            return False
        self._advance = self._read_text
        if behind.startswith("["):
            self._open("[", LIST_ENDS)
        return True

    _advance = _read_start

    def _open(self, mark: str, ends: tuple[str, ...]) -> None:
        """Begins a list of calls after its opening mark."""
        self._raw, self._is_sent = self._read(self._pending.index(mark) + len(mark)), False
        self._ends, self._advance = ends, self._read_between

    def _read_text(self) -> bool:
        begin = self._pending.find(BLOCK)
        if begin < 0:
            held = 0 if self._ended else unfinished(self._pending, (BLOCK,))
            self._say(self._read(len(self._pending) - held))
            return False
        self._say(self._read(begin))
        self._open(BLOCK, (BLOCK_END,))
        return True

    def _read_between(self) -> bool:
        """Reads the text between two calls."""
        rest = self._pending.lstrip(SPACE + ",")
        if not self._ended and any(end.startswith(rest) and end != rest for end in self._ends):
            return False
        read = self._read(len(self._pending) - len(rest))
        end = next((end for end in self._ends if rest.startswith(end)), "")
        self._raw += read + self._read(len(end))
        if end or not rest:
            return self._give_up()
        self._advance = self._read_function
        return True

    def _read_function(self) -> bool:
        """Reads a function's name, its bracket and the first argument's name; once all three are read, the text is
        certainly a call.
        """
        name = _NAME.match(self._pending)
        rest = self._pending[name.end() :] if name else ""
        if name and not rest and not self._ended:
            return False
        inner = rest[1:].lstrip(SPACE) if rest.startswith("(") else None
        if inner is None or not self._types.knows(name[0]):
            return self._give_up()
        key = _KEY.match(inner)
        behind = inner[key.end() :].lstrip(SPACE) if key else ""
        if (not inner or (key and not behind)) and not self._ended:
            return False
        if not inner.startswith(")") and not behind.startswith("="):
            return self._give_up()
        self._pending, self._raw, self._is_sent = inner, "", True
        self._num_arguments = 0
        self._send("{", name[0])
        self._advance = self._read_argument
        return True

    def _read_argument(self) -> bool:
        """Reads the name of the next argument, or the end of the call."""
        self._pending = self._pending.lstrip(SPACE + ("," if self._num_arguments else ""))
        if self._pending.startswith(")"):
            self._read(1)
            self._send("}")
            self._advance = self._read_between
            return True
        key = _KEY.match(self._pending)
        behind = self._pending[key.end() :].lstrip(SPACE) if key else ""
        if not self._pending or (key and not behind):
            return False
        if not behind.startswith("="):
            self._advance = self._drop_rest
            return True
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._send(f"{comma}{quoted(key[0])}: ")
        self._pending, self._scan, self._advance = behind[1:], _Scan(), self._read_value
        return True

    def _read_value(self) -> bool:
        for position, char in enumerate(self._pending):
            if not self._scan.take(char):
                self._read(position)
                value = _as_json(self._scan.text)
                if value is None:
                    self._advance = self._drop_rest
                else:
                    self._send(value)
                    self._advance = self._read_argument
                return True
        self._pending = ""
        return False

    def _give_up(self) -> bool:
        """Stops reading calls. The part of the list that was not sent, and all later text, become answer text."""
        if self._num_calls:
            self._raw = ""
        self._drop_call()
        self._advance = self._read_text
        return True


class _Scan:
    """Finds the end of a value. The value ends before the first comma or closing bracket that is not within brackets of
    the value itself.
    """

    def __init__(self) -> None:
        self.text = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def take(self, char: str) -> bool:
        """Reads a character; returns False if the value has ended before this character."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
            # Line breaks in strings are escaped, because models write strings that extend over several lines, which
            # Python's parser would reject.
            self.text += "\\n" if char == "\n" else char
            return True
        if self._depth == 0 and char in ",)":
            return False
        if char in "\"'":
            self._quote = char
        self._depth += _BRACKETS.get(char, 0)
        self.text += char
        return True


def _as_json(text: str) -> str | None:
    """Converts a Python literal to JSON; returns None if the text is not a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = _value(ast.parse(text.strip(), mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -node.operand.value
        case ast.List() | ast.Tuple():
            return [_value(element) for element in node.elts]
        case ast.Dict() if all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            return {key.value: _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.Name() if node.id in _WORDS:
            return _WORDS[node.id]
    raise ValueError("not a literal")
