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

BOMBS = {
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
