"""Recognises classes of transformers by their code: transformers copies a few modules into many families."""

import inspect
from collections.abc import Collection
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType

_ORIGINALS = frozenset(
    {
        *("llama", "qwen2", "qwen3", "mixtral", "gemma2", "glm", "phi3", "olmo2", "deepseek_v3", "exaone4", "apertus"),
        *("glm4_moe", "granitemoe", "hunyuan_v1_dense", "qwen2_moe", "qwen3_5_moe"),
    }
)
"""Families with whose classes other classes are compared."""


def known_as(kind: type, known: Collection[str]) -> str | None:
    """Returns the full name in `known` of a class or of one with the same code in `forward`; None if there is none."""
    name = name_of(kind)
    if name in known:
        return name
    return _same_as(kind, frozenset(known)) if kind.__module__.startswith("transformers.models.") else None


def name_of(kind: type) -> str:
    """Returns module path and qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _same_as(kind: type, known: frozenset[str]) -> str | None:
    own = inspect.unwrap(kind.forward)
    names = (name for name in sorted(known) if name.split(".")[2] in _ORIGINALS)
    for name in names:
        original = _original(name)
        if original is not None and _same(own, inspect.unwrap(original.forward)):
            return name
    return None


@cache
def _original(name: str) -> type | None:
    """Returns the class with a full name; None if this version of transformers lacks it."""
    module, _, kind = name.rpartition(".")
    try:
        return getattr(import_module(module), kind, None)
    except ModuleNotFoundError:
        return None


def _same(one: FunctionType, other: FunctionType) -> bool:
    """Whether two functions have the same code, and so have the functions of their modules that they call."""
    if _code_of(one.__code__) != _code_of(other.__code__):
        return False
    pairs = [[part.__globals__.get(name) for part in (one, other)] for name in one.__code__.co_names]
    called = [pair for pair in pairs if any(isinstance(each, FunctionType) for each in pair)]
    return all(type(ours) is type(theirs) and (ours is theirs or _same(ours, theirs)) for ours, theirs in called)


def _code_of(code: CodeType) -> tuple[object, ...]:
    """A function's code without its name and its docstring, which is the first constant."""
    consts = [_code_of(const) if isinstance(const, CodeType) else const for const in code.co_consts]
    has_doc = bool(consts) and isinstance(consts[0], str)
    return code.co_code, code.co_names, code.co_varnames, *consts[has_doc:]
