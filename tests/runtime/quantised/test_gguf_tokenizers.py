"""Texts are split as the tokenizer of each family splits them, by its published expressions.

The reference is the package `regex`, which the expressions were written for; no model is downloaded.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen3_5 import tokenization_qwen3_5 as qwen3_5

from wingbeat.runtime.quantised.gguf_splits import PRE_TOKENIZERS
from wingbeat.runtime.quantised.gguf_tokenizer import write_tokenizer

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


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2 = Published("encoder.py of GPT-2", (_GPT2,))
DIGITS_GPT2 = Published(
    "tokenizer.json of StarCoder, Command-R and Granite: digits alone, then GPT-2's", (r"\p{N}", _GPT2)
)
CL100K = Published(
    "tiktoken's cl100k_base, and tokenizer.json of Llama 3",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
)
QWEN2 = Published(
    "tokenizer.json of Qwen2",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
)
O200K = Published(
    "tiktoken's o200k_base, and tokenizer.json of gpt-oss and Llama 4",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
TEKKEN = Published(
    "tekken.json of Mistral",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
SEED = Published(
    "tokenizer.json of Seed-Coder",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)"
        r"|\s+",
    ),
)
DEEPSEEK_V3 = Published(
    "tokenizer.json of DeepSeek-V3",
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_CODER = Published("tokenizer.json of DeepSeek-Coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}"))
DEEPSEEK_LLM = Published(
    "tokenizer.json of DeepSeek-LLM, its letters by their category: those that have case, without modern Georgian",
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _EAST,
        r"\p{N}+",
    ),
)
BLOOM = Published("tokenizer.json of BLOOM", (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
PUBLISHED = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "olmo"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone", "command-r"), DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), CL100K),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), QWEN2),
    "qwen35": Published("transformers' tokenizer of Qwen3.5", (qwen3_5.PRETOKENIZE_REGEX,)),
    "seed-coder": SEED,
    **dict.fromkeys(("gpt-4o", "llama4"), O200K),
    "tekken": TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK_V3),
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-llm": DEEPSEEK_LLM,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
}


def pieces_of(pre: str, text: str) -> list[str]:
    """The pieces of our splits, as a tokenizer reads them from its file."""
    fields = json.loads(Tokenizer(models.BPE()).to_str())
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre].steps}
    split = Tokenizer.from_str(json.dumps(fields)).pre_tokenizer.pre_tokenize_str(text)
    begun = [begin for _, (begin, _) in split]
    return [text[begin:end] for begin, end in zip(begun, [*begun[1:], len(text)], strict=True)]


def test_each_family_has_its_expressions_here():
    assert PUBLISHED.keys() == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_split_by_the_published_expressions(pre):
    for text in TEXTS:
        assert pieces_of(pre, text) == PUBLISHED[pre].split(text)


def written(folder: Path, pre: str, **fields: Any) -> Tokenizer:
    """The tokenizer of a file of bytes and one word, `hello`, that no pairs make."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hello", "<s>"]
    own = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["h e"], "bos_token_id": len(tokens) - 1} | fields
    write_tokenizer({f"tokenizer.ggml.{name}": value for name, value in own.items()}, folder, "tiny.gguf")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_text_comes_back_whole(pre, tmp_path):
    tokenizer = written(tmp_path, pre, add_bos_token=False)
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].is_composed else text
        assert tokenizer.decode(tokenizer.encode(text).ids) == composed


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "gpt-4o"])
def test_words_that_are_tokens_and_first_tokens_are_the_familys(pre, tmp_path):
    is_llama = pre != "gpt-4o"
    found = written(tmp_path, pre).encode("hello").tokens
    assert found == (["<s>", "hello"] if is_llama else ["he", "l", "l", "o"])
    for says in (True, False):
        found = written(tmp_path, pre, add_bos_token=says).encode("hello").tokens
        assert (found[0] == "<s>") == says
