"""Texts are split as the tokenizer of each family splits them, by its published expressions.

The reference is the package `regex`, which the expressions were written for; no model is downloaded.
"""

import json
from typing import NamedTuple

import pytest
import regex
from tokenizers import Tokenizer, models

from wingbeat.runtime.quantised.gguf_tokenizer import PRE_TOKENIZERS

TEXTS = (
    "Hello, World! It's 12345 o'clock; we'll see, WE'LL see.",
    "camelCaseWords HTTPServer iPhone XMLHttpRequest2 _private $var += 3.14e-10",
    "  leading   and trailing  \n\n\tnew\r\nlines \n",
    "def f(x):\n    return x**2  # a comment / path/to/file\n\n\n",
    "\u4e2d\u6587\u5b57\u7b26 1\u5e74\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \uff10\uff11\uff21\uff22",
    "\ud55c\uad6d\uc5b4 \u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0391\u03b8\u03ae\u03bd\u03b1 Stra\u00dfe",
    "e\u0301te\u0301 nai\u0308ve \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0645\u0631\u062d\u0628\u0627\u060c \u0661\u0662\u0663\u0664 \u06d4 \u0967\u0968",
    "\U0001f600\U0001f3fd emoji \u2764\ufe0f!! ?? \u2026 \u201cquotes\u201d \u2018it\u2019s\u2019 -- |<>| `a` ^~ ~",
    "x1y22z333 1,000,000.00 \u00bd\u00b2 IV\u2163 a'b'C don'T 'tis\u00a0nbsp (see) [x] {y}",
)


class Published(NamedTuple):
    """A family's expressions, applied one after the other, each to the pieces that are left of the one before."""

    source: str
    expressions: tuple[str, ...]

    def split(self, text: str) -> list[str]:
        """The pieces; matches and what lies between them are a piece each."""
        pieces = [text] if text else []
        for expression in self.expressions:
            pieces = [part for piece in pieces for part in isolated(regex.compile(expression), piece)]
        return pieces


def isolated(expression: regex.Pattern, text: str) -> list[str]:
    ends = [0]
    for match in expression.finditer(text):
        ends += match.span()
    return [text[begin:end] for begin, end in zip(ends, [*ends[1:], len(text)], strict=True) if begin < end]


PUBLISHED = {
    "gpt-4o": Published(
        "tiktoken's o200k_base, and tokenizer.json of gpt-oss",
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
}


def pieces_of(pre: str, text: str) -> list[str]:
    """The pieces of our splits, as a tokenizer reads them from its file."""
    written = json.loads(Tokenizer(models.BPE()).to_str())
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]}
    split = Tokenizer.from_str(json.dumps(written)).pre_tokenizer.pre_tokenize_str(text)
    begun = [begin for _, (begin, _) in split]
    return [text[begin:end] for begin, end in zip(begun, [*begun[1:], len(text)], strict=True)]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_split_by_the_published_expressions(pre):
    for text in TEXTS:
        assert pieces_of(pre, text) == PUBLISHED[pre].split(text)
