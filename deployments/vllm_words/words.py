"""Translates the command line of `vllm serve` to that of `wingbeat serve`."""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from wingbeat.deployments.cli.options import UserError, option_name
from wingbeat.deployments.options.problems import plain_type
from wingbeat.deployments.vllm_words.foreign_rows import translate
from wingbeat.deployments.vllm_words.speculative_config import PLACE, flat
from wingbeat.deployments.vllm_words.vllm_options import SHORT, VLLM

COMMANDS_OWN = {"host": False, "port": False, "address": False, "detach": True, "log_level": False, "help": True}
"""Options of `wingbeat serve` that are not settings; the value is True for flags, which take no value."""
_NAMES, _ADAPTERS = "served_model_name", "lora_modules"
"""Options that, as in vLLM, may be followed by several values, each in a separate word."""
_SAID = {"true": True, "false": False, "none": None}


class Words(NamedTuple):
    """A command line in which Wingbeat's settings have replaced vLLM's options."""

    args: list[str]
    notes: list[str]
    """A message for each option that is ignored."""


def without_vllm(args: Sequence[str], settings: type[BaseModel]) -> Words:
    """Replaces vLLM's options on the command line of `wingbeat serve` by settings.

    Args:
        args: words of the command line after `serve`.
        settings: model whose fields are options of the command.

    Raises:
        UserError: an option is unknown, not supported, or contradicts another option; the message is one line.
    """
    flags = {name: plain_type(field.annotation) is bool for name, field in settings.model_fields.items()}
    kept, values, own, bare = _sorted(_with_words(args, settings), flags | COMMANDS_OWN)
    beside = own | ({"model": bare[0]} if bare else {})
    try:
        found = translate(flat(_nested(values)), VLLM, _as_written, flags, option_name, beside)
    except ValueError as error:
        raise UserError(str(error)) from None
    for name in found.settings.keys() & own.keys():
        raise UserError(f"{option_name(name)} {own[name]}: another option says {found.settings[name]}; give one")
    for name in found.settings.keys() - flags.keys():
        raise UserError(f"{option_name(name)} is no setting of this server")
    added = [word for name, value in found.settings.items() for word in _option(name, value, flags[name])]
    return Words(kept + added, found.notes)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts options with a dot, such as `limit_mm_per_prompt.image`, to objects; fields of `speculative_config` stay
    flat.

    Raises:
        ValueError: a field is given twice, or an option is given together with its fields, but its value is not an
            object.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        option, *path = name.split(".")
        if not path or option == PLACE:
            found[name] = _merged(found[name], value, name) if isinstance(found.get(name), dict) else value
            continue
        field = reduce(lambda inner, key: {key: inner}, reversed(path), value)
        found[option] = _merged(found[option], field, option) if option in found else field
    return found


def _merged(one: Any, other: Any, name: str) -> dict[str, Any]:
    """Merges two objects, each of which may be given as JSON text."""
    objects = [_value("", part, False, {}) if isinstance(part, str) else part for part in (one, other)]
    if not all(isinstance(part, dict) for part in objects):
        raise ValueError(f"{option_name(name)} is given beside one of its fields: give one of them")
    first, second = objects
    both = {key: _merged(first[key], second[key], f"{name}.{key}") for key in first.keys() & second.keys()}
    return first | second | both


def _with_words(args: Sequence[str], settings: type[BaseModel]) -> list[str]:
    """Adds the value true (or false, if the option is negated) to options that may be given without a value, such as
    `--cuda-graphs`, and are given without a value.
    """
    found = list(args)
    kinds = {name: field.annotation for name, field in settings.model_fields.items()}
    either = {name for name, kind in kinds.items() if plain_type(kind) is not bool and bool in get_args(kind)}
    for index, word in enumerate(args):
        name, negated, said = _name(word)
        following = args[index + 1] if index + 1 < len(args) else "-"
        # The next word need not be the value of the option, because it may be the model, which is given without an
        # option name.
        alone = negated or following.startswith("-") or "/" in following or Path(following).is_dir()
        if name in either and said is None and alone:
            found[index] = f"{option_name(name)}={'false' if negated else 'true'}"
    return found


class _Sorted(NamedTuple):
    kept: list[str]
    """Words that are passed on unchanged."""
    values: dict[str, Any]
    """Values of vLLM's options, by name."""
    own: dict[str, str]
    """Values of Wingbeat's options, by name; their words are in `kept`."""
    bare: list[str]
    """Positional words, such as the model; these words are also in `kept`."""


def _sorted(args: Sequence[str], own: Mapping[str, bool]) -> _Sorted:
    found, index = _Sorted([], {}, {}, []), 0
    while index < len(args):
        word, index = args[index], index + 1
        name, negated, said = _name(word)
        foreign = name is not None and name.partition(".")[0] in {*VLLM, PLACE} - {*COMMANDS_OWN}
        if name is None or not (foreign or name in own):
            found.kept.append(word)
            found.bare.extend([] if word.startswith("-") else [word])
            continue
        flag = own[name] if name in own else VLLM[name].flag if name in VLLM else False
        if said is None and not flag and index < len(args):
            said, index = args[index], index + 1
        elif said is None and not flag:
            raise UserError(f"{option_name(name)} needs a value")
        if not foreign:
            found.kept.extend([word.partition("=")[0].replace("_", "-"), *([] if flag else [str(said)])])
            found.own[name] = str(said)
            continue
        found.values[name] = _value(name, said, flag and not negated, own)
        while index < len(args) and _goes_on(name, args[index], found):
            found.values[name], index = [*_listed(found.values[name]), args[index]], index + 1
    return found


def _name(word: str) -> tuple[str | None, bool, str | None]:
    """Splits a word of the command line. Returns the option's name with underscores (None for a positional word),
    whether the option is negated, and the value after `=`, if there is one.
    """
    if word[:2] == "-O" and word[2:].isdecimal():  # the value follows without a space, as in a compiler's option
        word = f"-O={word[2:]}"
    option, sign, said = word.partition("=")
    if not option.startswith("--"):
        short, dot, rest = option[1:].partition(".")
        name = SHORT.get(short if option.startswith("-") else "")
        return name and name + dot + rest.replace("-", "_"), False, said if sign else None
    first, dot, rest = option[2:].partition(".")
    name = first.replace("-", "_")
    negated = name.startswith("no_")
    return name.removeprefix("no_") + dot + rest.replace("-", "_"), negated, said if sign else None


def _value(name: str, said: str | None, turned_on: bool, own: Mapping[str, bool]) -> Any:
    """Parses `true`, `false`, `none` and JSON. Other text, and the values of Wingbeat's own settings, remain text."""
    if said is None:
        return turned_on
    if name in own and not own[name]:
        return said
    if said.lower() in _SAID:
        return _SAID[said.lower()]
    try:
        return json.loads(said)
    except ValueError:
        return said


def _as_written(name: str) -> str:
    option, dot, field = name.partition(".")
    return option_name(option) + dot + field


def _goes_on(name: str, word: str, before: _Sorted) -> bool:
    """Whether `word` is a further value of the option before it.

    A word without an option may also be the model or the drafter. Therefore a further model name is accepted only if
    the model has already been given and no folder has this name.
    """
    if word.startswith("-"):
        return False
    if name == _ADAPTERS:
        return "=" in word or word.startswith("{")
    return name == _NAMES and bool(before.bare or "model" in before.values) and not Path(word).is_dir()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _option(name: str, value: Any, is_flag: bool) -> list[str]:
    if is_flag:
        return [option_name(name) if value else option_name(f"no_{name}")]
    return [option_name(name), json.dumps(value) if isinstance(value, dict | list | bool) else str(value)]
