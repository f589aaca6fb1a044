"""Normalises values of config.json and generation_config.json, for verifiers, heads and drafters.

This module imports no torch.

Files that went through YAML, a spreadsheet or another library hold numbers and booleans as text, whole numbers as
floats, and dtypes under many names. This module converts the values; `config_numbers` checks them.
"""

import re
from collections.abc import Mapping
from typing import Any

from wingbeat.runtime.config import dtype_name
from wingbeat.runtime.config_values.config_numbers import FOREIGN, is_whole

_DTYPES = frozenset({"dtype", "torch_dtype"})
_WORDS = {"true": True, "false": False}
_NOTHING = frozenset({"null", "none"})
_NUMBER = re.compile(r"[+-]?(\d{1,40}(?P<fraction>\.\d*)?|\.\d+)(?P<exponent>[eE][+-]?\d+)?")
_TEXT = re.compile(
    r"_?(\w+_)?((name|path|version|revision|hash|template|prompt|date|author|task|label|format|method|type|class)s?"
    r"|token|special_tokens)"
)
"""Names of fields whose values stay text, even if the text looks like a number or a boolean."""


def meant(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config's fields, including nested objects, with normalised values."""
    return {
        name: value if name in FOREIGN and name != "quantization_config" else _value(name, value)
        for name, value in fields.items()
    }


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return meant(value)
    if isinstance(value, list):
        return [_value(name, item) for item in value]
    if isinstance(value, str):
        return dtype_name(value) if name in _DTYPES else _of_text(name, value)
    if isinstance(value, float) and is_whole(name) and value.is_integer():
        return int(value)
    return value


def _of_text(name: str, text: str) -> Any:
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if is_whole(name) and word.lower() in _NOTHING:
        return None
    number = _NUMBER.fullmatch(word)
    if number is None or (_TEXT.fullmatch(name) and not is_whole(name)):
        return text
    if number["fraction"] is None and number["exponent"] is None and not word.lstrip("+-").startswith("."):
        return int(word)
    return _value(name, float(word))
