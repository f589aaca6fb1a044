"""Translates regular expressions of JSON schemas (ECMAScript) to the Rust syntax that llguidance reads.

In Rust, character classes can be nested, subtracted and intersected, and `\\d`, `\\w` and `\\s` are Unicode classes.
Character classes of ECMAScript and Python have no such operations, and the two dialects disagree on Unicode. A
translated class therefore contains only the characters that the class contains in both dialects.
"""

import re

_REST = r"(?:.|\n)*"
_PIECE = re.compile(r"\\(.)|(\[\^?\]?)|.", re.DOTALL)
_IN_CLASS = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|[pP][A-Z]|.)|(.)", re.DOTALL)
_WORDS = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}_"
_BLANKS = r"\s\x{1C}-\x{1F}\x{85}\x{FEFF}"
_NARROW = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x{0B}\x{0C}\r\x20",
    "D": r"\P{Nd}",
    "W": f"[^{_WORDS}]",
    "S": f"[^{_BLANKS}]",
}
"""For each escape, such as that of digits, the characters that belong to its class in both dialects."""
_WIDE = {
    "d": r"\p{Nd}",
    "w": _WORDS,
    "s": _BLANKS,
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\t\n\x{0B}\x{0C}\r\x20]",
}
"""For each escape, the characters that belong to its class in at least one dialect. A negated class must exclude all of
these characters.
"""


def rust_pattern(pattern: str) -> str:
    """Translates an expression to Rust syntax. Whether the expression is valid is checked later, when it is
    compiled.
    """
    written, place = [], 0
    while place < len(pattern):
        found = _PIECE.match(pattern, place)
        place = found.end()
        escaped, opens = found.groups()
        if opens:
            inner, place = _class(pattern, place, "^" in opens)
            written.append(opens.rstrip("]") + (r"\]" if opens.endswith("]") else "") + inner)
        elif escaped is None:
            written.append(found[0])
        elif escaped in _NARROW:
            written.append(f"[{_NARROW[escaped]}]")
        else:
            written.append(_escape(escaped))
    return "".join(written)


def searched(pattern: str) -> str:
    """Expression that matches a whole string if `pattern` matches anywhere in the string.

    Raises:
        ValueError: an anchor (^ or $) is not at the beginning or end of an alternative.
    """
    alternatives, depth, place = [""], 0, 0
    while place < len(pattern):
        found = _PIECE.match(pattern, place)
        piece, place = found[0], found.end()
        if found[2]:
            end = pattern.find("]", place)
            while end > 0 and (end - len(pattern[:end].rstrip("\\"))) % 2:
                end = pattern.find("]", end + 1)
            piece, place = pattern[found.start() : end + 1], end + 1
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            alternatives.append("")
        elif piece in "^$" and not (depth == 0 and _at_an_end(piece, alternatives[-1], pattern[place : place + 1])):
            raise ValueError(f"has the anchor {piece!r} elsewhere than at an end of an alternative")
        else:
            alternatives[-1] += piece
    return "|".join(map(_anywhere, alternatives))


def _at_an_end(anchor: str, before: str, behind: str) -> bool:
    return not before if anchor == "^" else behind in ("", "|")


def _anywhere(alternative: str) -> str:
    begins, ends = alternative.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", alternative) is not None
    inner = alternative[begins : len(alternative) - ends]
    return f"{'' if begins else _REST}(?:{inner}){'' if ends else _REST}"


def _class(pattern: str, place: int, is_negated: bool) -> tuple[str, int]:
    """Translates the rest of a character class, beginning at position `place`. Returns the translation and the position
    after the class.
    """
    sets, written = _WIDE if is_negated else _NARROW, []
    while place < len(pattern):
        if pattern[place] == "]":
            return "".join(written) + "]", place + 1
        low, is_set, place = _atom(pattern, place, sets)
        written.append(low)
        if is_set or pattern[place : place + 1] != "-" or pattern[place + 1 : place + 2] in ("", "]"):
            continue
        high, is_set, behind = _atom(pattern, place + 1, sets)
        if not is_set:
            written.append(f"-{high}")
            place = behind
    return "".join(written), place


def _atom(pattern: str, place: int, sets: dict[str, str]) -> tuple[str, bool, int]:
    """Returns three things for one character or escape in a class: its translation, whether it stands for a set of
    characters, and the position after it.
    """
    found = _IN_CLASS.match(pattern, place)
    escaped, plain = found.groups()
    if plain is not None:
        # These characters are escaped, because single or doubled they have another meaning in Rust's classes.
        return f"\\{plain}" if plain in "[&~^-" else plain, False, found.end()
    if escaped in sets:
        return sets[escaped], True, found.end()
    is_set = escaped[0] in "pP" and len(escaped) > 1
    return r"\x{08}" if escaped == "b" else _escape(escaped), is_set, found.end()


def _escape(escaped: str) -> str:
    r"""Translation of a backslash with a character, or of a longer escape."""
    # The backslash is dropped before letters beyond ASCII, which Rust does not allow, and before `<` and `>`, which
    # would be word boundaries.
    return escaped if not escaped[0].isascii() or escaped in "<>" else f"\\{escaped}"
