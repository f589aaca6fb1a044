"""Parses grammars in EBNF, as xgrammar and llama.cpp (GBNF) write them, into forms."""

import re
from typing import TYPE_CHECKING

from wingbeat.runtime.grammar.forms import Either, Form, In, Regex, Rule, Times, leaves, text
from wingbeat.runtime.grammar.patterns import rust_pattern

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

_PIECE = re.compile(r'("(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|#[^\n]*|\n(?!\s*[\w-]+\s*::=)\s*', re.DOTALL)
"""Matches strings and character classes, which are kept (group 1), and pieces that are replaced by a space: comments,
and line ends inside a rule.
"""
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def rules_of(grammar: str) -> dict[str, Form]:
    """Rules of a grammar, by name.

    Raises:
        ValueError: the text is not a valid grammar, or a rule is missing.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser

    try:
        parsed = GrammarParser().parse(_PIECE.sub(lambda piece: _plain(piece[1] or " "), grammar).replace("\r", " "))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from None
    rules = {name: _form(node.alternatives) for name, node in parsed.items()}
    used = {"root"}.union(*(_names(form) for form in rules.values()))
    if missing := sorted(used - set(rules)):
        raise ValueError(f"there is no rule {missing[0]!r}")
    return {name: _without_recursion(name, form) for name, form in rules.items()}


def _plain(piece: str) -> str:
    """A string or character class, with escaped character numbers replaced by the characters."""

    def character(code: re.Match[str]) -> str:
        if code[4] is not None:
            return code[0]
        letter = chr(int(code[1] or code[2] or code[3], 16))
        named = next((name for name, value in _LETTERS.items() if value == letter), None)
        return f"\\{named or letter}" if named or letter in '"\\[]' else letter

    return _CODE.sub(character, piece)


def _form(node: "ASTNode") -> Form:
    from llguidance import gbnf_to_lark as ast

    match node:
        case ast.LiteralNode():
            return text(_CODE.sub(lambda code: _LETTERS.get(code[4], code[4]), node.value))
        case ast.RegexNode():
            return Regex(f"/{rust_pattern(node.rx) if node.rx != '.' else '(?s:.)'}/".replace("\n", "\\n"))
        case ast.RuleRefNode():
            return Rule(node.name)
        case ast.RepetitionNode():
            return Times(_form(node.node), node.min_times, node.max_times)
        case ast.SequenceNode():
            return In([_form(one) for one in node.nodes])
        case _:
            return Either([_form(one) for one in node.children()])


def _names(form: Form) -> set[str]:
    return {leaf.name for leaf in leaves(form) if isinstance(leaf, Rule)}


def _without_recursion(name: str, form: Form) -> Form:
    """The form of a rule. If the rule refers to itself only at one end, the recursion is replaced by a repetition.

    Such a rule is then regular, so that it can be written as a lexeme.
    """
    itself = Rule(name)
    ways = [one for one in form.forms if one.order != [itself]]
    for place, rest in ((-1, slice(None, -1)), (0, slice(1, None))):
        again = [In(way.order[rest]) for way in ways if way.order and way.order[place] == itself]
        ends = [way for way in ways if name not in _names(way)]
        if ends and not any(name in _names(way) for way in again) and len(again) + len(ends) == len(ways):
            parts = [Times(Either(again), 0, None), Either(ends)] if again else [Either(ends)]
            return In(parts if place else parts[::-1])
    return form
