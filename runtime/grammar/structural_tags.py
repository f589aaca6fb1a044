"""Translates xgrammar's structural tags, which constrain parts of an answer, to forms."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from wingbeat.runtime.grammar.ebnf import rules_of
from wingbeat.runtime.grammar.forms import (
    NOTHING,
    Either,
    Form,
    In,
    Other,
    Regex,
    Rule,
    Times,
    json_of,
    optional,
    pattern,
    renamed,
    text,
    until,
    without,
)
from wingbeat.runtime.grammar.patterns import searched
from wingbeat.runtime.grammar.schema_check import enforced
from wingbeat.runtime.grammar.schema_choices import resolve
from wingbeat.runtime.grammar.string_formats import PATTERNS

Format = Mapping[str, Any]
_SPACE = Regex(r"/[ \n\r\t]{0,16}/")
_STYLES = {
    "qwen_xml": ("<parameter=", ">", "</parameter>", "\n"),
    "glm_xml": ("<arg_key>", "</arg_key>{space}<arg_value>", "</arg_value>", ""),
}
"""For each style: the marks before an argument's name, after the name and after the value, and the text that surrounds
a value.
"""
_OF_STRINGS = {"format", "pattern", "minLength", "maxLength"}


class StructuralTag:
    """Form of a structural tag, and the rules of the grammars in it.

    Args:
        special: ids of special tokens by their text; marks may contain such texts.
        never: tokens that no part of a tag allows.
        field: request field that holds the tag.

    Raises:
        ValueError: the tag is invalid or has a part that is not supported; the message names the part.
    """

    def __init__(self, tag: Any, special: Mapping[str, int], never: Sequence[int], field: str) -> None:
        self._special, self._never, self._field = special, never, field
        self.rules: dict[str, Form] = {}
        self.schemas: list[tuple[str, Any]] = []
        """Paths in the request of the schemas in the tag, each with the schema rewritten for llguidance."""
        try:
            self.form = self._form(tag["format"] if "format" in tag else _from_triggers(tag))
        except (KeyError, TypeError, AttributeError) as error:
            kind = "lacks" if isinstance(error, KeyError) else "cannot be read:"
            raise ValueError(f"{field} {kind} {error}") from None

    def _form(self, part: Format, end: Sequence[str] = ()) -> Form:
        """Form of a part. If `end` contains marks, the form ends with one of these marks."""
        kind = part["type"]
        if kind == "any_text":
            return self._free_text(part, end)
        if kind == "triggered_tags":
            return self._triggered(part, end)
        make = self._PARTS.get(kind)
        if make is None:
            raise ValueError(f"{self._field} has a part of type {str(kind)[:40]!r}, which is not served")
        form = make(self, part)
        return In([form, Either([self._marks(mark) for mark in end])]) if end else form

    def _marks(self, value: str) -> Form:
        """Form of a text. Where the text contains the text of a special token, only that token matches."""
        for name in sorted(self._special, key=len, reverse=True):
            before, found, behind = value.partition(name)
            if found:
                parts = [self._marks(before), Other(f"<[{self._special[name]}]>"), self._marks(behind)]
                return In([one for one in parts if one != NOTHING])
        return text(value)

    def _is_plain(self, mark: str) -> bool:
        return not any(name in mark for name in self._special)

    def _free_text(self, part: Format, end: Sequence[str]) -> Form:
        excluded = part.get("excludes") or []
        for limit in ("max_tokens", "max_chars"):
            if part.get(limit) is not None:
                raise ValueError(f"{self._field} has {limit!r}, which is not served")
        return Either([self._up_to(mark, [*excluded, *end]) for mark in end if mark]) if any(end) else without(excluded)

    def _up_to(self, mark: str, others: Sequence[str]) -> Form:
        """Form of a text up to and including a mark."""
        plain = [other for other in others if self._is_plain(other)]
        return until(mark, plain) if self._is_plain(mark) else In([without(plain), self._marks(mark)])

    def _triggered(self, part: Format, end: Sequence[str]) -> Form:
        triggers, tags = part["triggers"], []
        kept_out = [*triggers, *(part.get("excludes") or []), *(mark for mark in end if mark)]
        for tag in part["tags"]:
            trigger = next((one for one in triggers if tag["begin"].startswith(one)), None)
            if trigger is None:
                raise ValueError(f"{self._field} has a tag that no trigger begins")
            rest = {**tag, "begin": tag["begin"].removeprefix(trigger)}
            tags.append((trigger, self._form(rest)))
        calls = Either(
            [
                In([self._up_to(trigger, kept_out), Either([form for other, form in tags if other == trigger])])
                for trigger in dict.fromkeys(trigger for trigger, _ in tags)
            ]
        )
        plain = [mark for mark in kept_out if self._is_plain(mark)]
        last = Either([self._up_to(mark, kept_out) for mark in end]) if any(end) else without(plain)
        least = 1 if part.get("at_least_one") else 0
        if part.get("stop_after_first"):
            after = Either([self._marks(mark) for mark in end]) if any(end) else NOTHING
            return Either([In([calls, after]), *([] if least else [last])])
        return In([Times(calls, least, None), last])

    def _tag(self, part: Format) -> Form:
        begin, end = part["begin"], part["end"]
        ends = [end] if isinstance(end, str) else end
        if isinstance(ends, Mapping):
            content = In([self._form(part["content"]), self._form(ends)])
        else:
            content = self._form(part["content"], ends if any(ends) else ())
        return In([self._form(begin) if isinstance(begin, Mapping) else self._marks(begin), content])

    def _separated(self, part: Format) -> Form:
        tag = Either([self._form(one) for one in part["tags"]])
        more = Times(In([self._marks(part["separator"]), tag]), 0, None)
        form = tag if part.get("stop_after_first") else In([tag, more])
        return form if part.get("at_least_one") else optional(form)

    def _schema(self, part: Format) -> Form:
        place, style = str(part.get("place", self._field)), part.get("style", "json")
        schema = enforced(part["json_schema"], place)
        self.schemas.append((place, schema))
        if style == "json":
            return json_of(schema)
        if style not in _STYLES:
            raise ValueError(f"{place} has the style {str(style)[:40]!r}, which is not served")
        return _arguments(schema, style, place)

    def _grammar(self, part: Format) -> Form:
        prefix = f"{len(self.rules)}."
        self.rules |= {prefix + name: renamed(form, prefix) for name, form in rules_of(part["grammar"]).items()}
        return Rule(prefix + "root")

    def _token(self, part: Format) -> Form:
        return Other(f"<[{self._id(part['token'])}]>")

    def _other_token(self, part: Format) -> Form:
        ids = sorted({*map(self._id, part.get("exclude_tokens") or []), *self._never})
        return Other(f"<[^{','.join(map(str, ids))}]>")

    def _id(self, token: int | str) -> int:
        return token if isinstance(token, int) else self._special[token]

    _PARTS: ClassVar[dict[str, Callable[["StructuralTag", Format], Form]]] = {
        "const_string": lambda self, part: self._marks(part["value"]),
        "regex": lambda self, part: pattern(part["pattern"]),
        "grammar": _grammar,
        "json_schema": _schema,
        "qwen_xml_parameter": lambda self, part: self._schema({**part, "style": "qwen_xml"}),
        "sequence": lambda self, part: In([self._form(one) for one in part["elements"]]),
        "or": lambda self, part: Either([self._form(one) for one in part["elements"]]),
        "tag": _tag,
        "tags_with_separator": _separated,
        "optional": lambda self, part: optional(self._form(part["content"])),
        "plus": lambda self, part: Times(self._form(part["content"]), 1, None),
        "star": lambda self, part: Times(self._form(part["content"]), 0, None),
        "repeat": lambda self, part: Times(
            self._form(part["content"]), int(part["min"]), None if part["max"] == -1 else int(part["max"])
        ),
        "token": _token,
        "exclude_token": _other_token,
        "any_tokens": lambda self, part: Times(self._other_token(part), 0, part.get("max_tokens")),
    }


def _from_triggers(tag: Format) -> Format:
    """Converts a tag of the older kind, with `structures` and `triggers`, to a part of the newer kind."""
    tags = [
        {"type": "tag", "begin": one["begin"], "content": {"type": "json_schema", "json_schema": one["schema"]}}
        | {"end": one["end"]}
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "tags": tags, "triggers": tag["triggers"]}


def _arguments(schema: Any, style: str, place: str) -> Form:
    """Form of an object's properties as text between marks."""
    before, behind, end, side = _STYLES[style]
    properties = schema.get("properties", {})

    def argument(name: Form, value: Form) -> Form:
        pieces = [text(piece) for piece in behind.split("{space}")]
        middle = [pieces[0]] if len(pieces) == 1 else [pieces[0], _SPACE, pieces[1]]
        return In([_SPACE, text(before), name, *middle, value])

    forms = []
    for name, value in properties.items():
        form = argument(text(name), _argument_value(value, schema, (side, end), place))
        forms.append(form if name in schema.get("required", ()) else optional(form))
    others = schema.get("additionalProperties", not properties)
    if others is not False:
        names = f" & ~({' | '.join(map(json.dumps, properties))})" if properties else ""
        value = _argument_value(others, schema, (side, end), place)
        forms.append(Times(argument(Regex(f"(/[A-Za-z_][A-Za-z0-9_]*/{names})"), value), 0, None))
    return In([*forms, _SPACE])


def _argument_value(value: Any, root: Any, marks: tuple[str, str], place: str) -> Form:
    """Form of an argument's value, including the marks around the value."""
    side, end = marks
    while isinstance(value, dict) and "$ref" in value:
        value = resolve(value["$ref"], root)
    value = value if isinstance(value, dict) else {}
    choices = [value["const"]] if "const" in value else value.get("enum")
    if choices is not None:
        written = [text(one if isinstance(one, str) else json.dumps(one)) for one in choices]
        return In([_SPACE, Either(written), _SPACE, text(end)])
    types = value.get("type", "string" if not value.keys() & {"anyOf", "oneOf", "allOf", "properties", "items"} else ())
    if types != "string" and "string" not in types:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return In([_SPACE, json_of({**value, **definitions}), _SPACE, text(end)])
    if not value.keys() & _OF_STRINGS:
        return until(end)
    return In([text(side), Regex(_string(value, end, place)), text(side + end)])


def _string(value: Mapping[str, Any], end: str, place: str) -> str:
    """Lark of the strings that a schema allows and that do not contain the end mark."""
    least, most = value.get("minLength", 0), value.get("maxLength", "")
    wanted = [pattern(PATTERNS[value["format"]]).lark] if "format" in value else []
    if "pattern" in value:
        try:
            wanted.append(pattern(searched(value["pattern"])).lark)
        except ValueError as error:
            raise ValueError(f"{place} has the keyword 'pattern', which {error}") from None
    return f"({' & '.join([*wanted, f'/(?s:.{{{least},{most}}})/', without([end]).lark])})"
