"""Abstract forms of answers, and their translation to llguidance's Lark.

llguidance splits a text into lexemes, each as long as possible, before it parses them: `/[a-z]*/ "b"` as two lexemes
matches nothing. Each regular part of a form is therefore written as a single lexeme.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from wingbeat.runtime.grammar.patterns import rust_pattern

MOST_WHITESPACE = 16
"""Maximum number of whitespace characters between two pieces of JSON; without a limit a model may write whitespace
forever.
"""
_JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_WHITESPACE}}}",
    # Escapes with \u are not allowed, because with them a key could be another spelling of a property's name.
    "json_allowed_escapes": 'nrbtf\\"',
}
HEADER = '%llguidance {"no_forcing": true}'
"""First line of every grammar: makes llguidance allow all tokenizations of forced text, so that the model chooses
among them.
"""
_ANY = "/(?s:.*)/"


class Regex(NamedTuple):
    """A terminal, as Lark source."""

    lark: str


class Other(NamedTuple):
    """A rule that is not regular, as Lark source."""

    lark: str


class Rule(NamedTuple):
    """Reference to a rule of a grammar, by the rule's name."""

    name: str


class In(NamedTuple):
    """Several forms, one after the other."""

    order: Sequence["Form"]


class Either(NamedTuple):
    """Choice between several forms."""

    forms: Sequence["Form"]


class Times(NamedTuple):
    """Repetition of a form; the number is unbounded if `most` is None."""

    form: "Form"
    least: int
    most: int | None


Form: TypeAlias = Regex | Other | Rule | In | Either | Times
NOTHING = Regex('""')


def text(value: str) -> Regex:
    """Form that matches exactly this text."""
    return Regex(json.dumps(value))


def pattern(expression: str) -> Regex:
    """Form of the texts that match a regular expression as a whole."""
    from llguidance import regex_to_lark

    return Regex(f"/{regex_to_lark(rust_pattern(expression), '')}/")


def without(marks: Sequence[str]) -> Regex:
    """Form of texts that contain none of the marks."""
    return Regex(f"({_ANY} & ~({_ANY} {_one_of(marks)} {_ANY}))") if marks else Regex(_ANY)


def until(mark: str, others: Sequence[str] = ()) -> Regex:
    """Form of texts that end with `mark` and contain no mark before this end."""
    return Regex(f"({_ANY} {json.dumps(mark)} & ~({_ANY} {_one_of([mark, *others])} /(?s:.+)/))")


def _one_of(marks: Sequence[str]) -> str:
    return f"({' | '.join(map(json.dumps, marks))})"


def json_of(schema: Any) -> Other:
    """Form of JSON texts that match a schema."""
    schema = {} if schema is True else {"not": {}} if schema is False else schema
    options = {"x-guidance": _JSON_OPTIONS}
    return Other(f"%json {json.dumps({**schema, **options}, allow_nan=False)}")


def renamed(form: Form, prefix: str) -> Form:
    """Returns a form in which the names of all rules have a prefix."""
    match form:
        case Rule(name):
            return Rule(prefix + name)
        case In(forms):
            return In([renamed(one, prefix) for one in forms])
        case Either(forms):
            return Either([renamed(one, prefix) for one in forms])
        case Times(inner, least, most):
            return Times(renamed(inner, prefix), least, most)
        case _:
            return form


def optional(form: Form) -> Times:
    """Form of a text that matches the form or is empty."""
    return Times(form, 0, 1)


def lark_of(form: Form, rules: Mapping[str, Form] | None = None) -> str:
    """Lark source of a form; the form may refer to the given rules."""
    return _Writer(rules or {}).write(form)


class _Writer:
    def __init__(self, rules: Mapping[str, Form]) -> None:
        self._rules = rules
        self._regular = _regular_rules(rules)
        self._terminals: dict[str, str] = {}
        """Names of terminals, by their Lark source."""
        self._names: dict[str, str] = {}
        """Lark names of the rules written so far, by rule."""
        self._lines: list[str] = []

    def write(self, form: Form) -> str:
        lines = [HEADER, f"start: {self._rule(form)}"]
        return "\n".join([*lines, *self._lines, *(f"{name}: {body}" for body, name in self._terminals.items())])

    def _is_regular(self, form: Form) -> bool:
        match form:
            case Regex():
                return True
            case Rule(name):
                return name in self._regular
            case Other():
                return False
            case _:
                return all(map(self._is_regular, _below(form)))

    def _rule(self, form: Form) -> str:
        if self._is_regular(form):
            return self._as_terminal(form)
        match form:
            case Other(lark):
                return lark
            case Rule(name):
                return self._named(name)
            case In(order):
                parts = []
                for is_regular, run in groupby(order, self._is_regular):
                    pieces = list(run)
                    parts += [self._as_terminal(In(pieces))] if is_regular else map(self._rule, pieces)
                return f"({' '.join(parts)})"
            case Either(forms):
                regular = [one for one in forms if self._is_regular(one)]
                parts = [self._rule(one) for one in forms if not self._is_regular(one)]
                return f"({' | '.join([*parts, *([self._as_terminal(Either(regular))] if regular else [])])})"
            case Times(inner, least, most):
                return f"({self._rule(inner)}){{{least},{'' if most is None else most}}}"

    def _as_terminal(self, form: Form) -> str:
        body = self._terminal(form)
        return body if body == NOTHING.lark else self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def _terminal(self, form: Form) -> str:
        match form:
            case Regex(lark):
                return lark
            case Rule(name):
                return self._named(name)
            case In(order):
                return f"({' '.join(map(self._terminal, order))})" if order else NOTHING.lark
            case Either(forms):
                return f"({' | '.join(map(self._terminal, forms))})"
            case Times(inner, least, most):
                return f"({self._terminal(inner)}){{{least},{'' if most is None else most}}}"

    def _named(self, name: str) -> str:
        if name not in self._names:
            is_regular = name in self._regular
            own = self._names[name] = f"{'R' if is_regular else 'r'}{len(self._names)}"
            body = (self._terminal if is_regular else self._rule)(self._rules[name])
            self._lines.append(f"{own}: {body}")
        return self._names[name]


def _below(form: Form) -> Sequence[Form]:
    match form:
        case In(forms) | Either(forms):
            return forms
        case Times(inner, _, _):
            return [inner]
        case _:
            return ()


def leaves(form: Form) -> Iterator[Regex | Other | Rule]:
    """The forms inside a form that do not contain further forms."""
    if isinstance(form, Regex | Other | Rule):
        yield form
    for one in _below(form):
        yield from leaves(one)


def _regular_rules(rules: Mapping[str, Form]) -> set[str]:
    """Names of rules that are regular: without recursion, and with regular leaves only."""
    regular: set[str] = set()
    waiting = {name: [one for one in leaves(form) if not isinstance(one, Regex)] for name, form in rules.items()}
    while found := [
        name
        for name, leaves in waiting.items()
        if all(isinstance(leaf, Rule) and leaf.name in regular for leaf in leaves)
    ]:
        regular.update(found)
        for name in found:
            del waiting[name]
    return regular
