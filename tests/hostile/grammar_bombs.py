"""Grammars that somebody wrote to hold up others: each with what it does to an engine that follows it."""

import json

from wingbeat.runtime.scheduling.request import GrammarSpec


def spec_of(kind, text):
    return GrammarSpec(kind, text, f"structured_outputs.{kind}")


def many_rules(count, before):
    """So many rules that match the same text, in any number and order."""
    names = [f"r{number}" for number in range(count)]
    rules = "\n".join(f'{name} ::= "a" | "a" {name}' for name in names)
    return f"root ::= {before} s\ns ::= ({' | '.join(names)})*\n{rules}"


DOUBLING = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"'
REPEATS = 'root ::= [b-z]{3} q{0,3000}\nq ::= r{0,3000}\nr ::= "a"?'
AMBIGUOUS = 'root ::= "b" s\ns ::= "a" | s s | s s s'


def nested(count, inner, wrap):
    """A schema in so many others."""
    for _ in range(count):
        inner = wrap(inner)
    return inner


def json_spec(schema):
    return spec_of("json", json.dumps(schema))


WIDE = "start: s\ns: (" + " | ".join(f"r{i}" for i in range(1500)) + ")*\n"
WIDE += "\n".join(f'r{i}: "a" | "a" r{i}' for i in range(1500))
SETS = "start: T\nT: " + " & ".join(f"/(?s:.*)[a-z]{{{i}}}x(?s:.*)/" for i in range(5, 60))
PATTERNS = {"allOf": [{"type": "string", "pattern": f"[ab]*a[ab]{{{10 + count}}}"} for count in range(20)]}
LISTS = {f"a{i}": {"type": "array", "items": {"const": i}, "maxItems": 10_000} for i in range(800)}
CHOICES = [{"anyOf": [{"required": [f"k{i}_{j}"]} for j in range(10)]} for i in range(20)]

BOMBS = {
    "wide, in Lark": spec_of("grammar", WIDE),
    "many sets": spec_of("grammar", SETS),
    "many patterns of a string": json_spec(PATTERNS),
    "many patterns of names": json_spec({"patternProperties": {f"^a{i}[a-z]{{0,50}}$": {} for i in range(900)}}),
    "many long lists": json_spec({"type": "object", "properties": LISTS}),
    "endless list": json_spec({"type": "array", "maxItems": 10**12}),
    "long texts": json_spec({"type": "string", "minLength": 10**8, "maxLength": 10**9}),
    "large multiple": json_spec({"type": "integer", "multipleOf": 2147483629}),
    "many choices": json_spec({"allOf": CHOICES}),
    "deep schema": json_spec(nested(400, {}, lambda inner: {"type": "array", "items": inner})),
    "deep parentheses": spec_of("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep expression": spec_of("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "long enumeration": json_spec({"enum": [str(i * 7919) for i in range(7000)]}),
    "optional letters": spec_of("regex", "[a-z]?" * 3000),
    "far back": spec_of("regex", r"(.|\n)*a(.|\n){500}c"),
    "doubling references": json_spec(
        {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"const": 1}},
            "$ref": "#/$defs/d0",
        }
    ),
    "certain for ever": spec_of("grammar", 'root ::= "a" root'),
    "certain for long": spec_of("grammar", 'root ::= "a"{1000000}'),
    "doubling": spec_of("grammar", DOUBLING),
    "ambiguous list": spec_of("grammar", 'root ::= a*\na ::= "x" | "x" a'),
    "ambiguous regex": spec_of("regex", "(a|a)*"),
    "ambiguous nest": spec_of("regex", "(a|aa|aaa|[a-z])*(a|b)*((a*)*)*"),
    "ambiguous sums": spec_of("grammar", AMBIGUOUS),
    "wide": spec_of("grammar", many_rules(300, '"zz"')),
    "wide behind letters": spec_of("grammar", many_rules(1500, '[b-y]{12} "zz"')),
    "counted twice": spec_of("regex", "(a{0,1000}){0,1000}"),
    "repeats of nothing": spec_of("grammar", REPEATS),
    "overlapping": spec_of("regex", "[a-z]*[0-9a-z]*[a-f]*[a-z]{0,500}[a-z]{0,500}"),
    "deep": spec_of("grammar", 'root ::= "(" root ")" root | "x"?'),
    "long choice": spec_of("choice", json.dumps(["a" * count for count in range(1, 360)])),
    "other alphabet": spec_of("grammar", 'root ::= ("漢" | "漢漢" | "😀")* "é"'),
}
ENDLESS = {"many patterns of a string", "many patterns of names", "many long lists"}
"""Nothing ends their compilation but the end of its process."""
EMPTY = {
    "itself": spec_of("grammar", "root ::= root"),
    "a reference to itself": spec_of("json", '{"$ref": "#"}'),
    "each other": spec_of("grammar", 'root ::= a\na ::= b "x"\nb ::= a'),
}
"""They match no text."""
EMPTY_LATER = {
    "behind a text": spec_of("grammar", 'root ::= "ab" empty\nempty ::= empty'),
    "in a list": spec_of("json", '{"type": "array", "minItems": 1, "items": {"$ref": "#/items"}}'),
}
"""They match no text, which shows at a later token."""
