"""Pre-tokenizer splits of byte-level BPE tokenizers by `tokenizer.ggml.pre`, in the form of tokenizer.json.

The names are llama.cpp's; the regular expressions are those in the tokenizers of the model families.
"""

from typing import Any, NamedTuple


class Splits(NamedTuple):
    """Splits of a tokenizer family, and other settings of the family that GGUF files do not contain."""

    steps: tuple[dict[str, Any], ...]
    """Pre-tokenizers of tokenizer.json, applied in order."""
    is_composed: bool = False
    """Whether texts are normalised to Unicode NFC."""
    keeps_words: bool = False
    """Whether a piece that is itself a token stays whole instead of being merged from its bytes."""
    begins: bool = False
    """Whether texts begin with the BOS token, for files that do not state this."""


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS_OF_GPT2 = _BYTES | {"use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_THREE, _BY_ONE = r"\p{N}{1,3}", r"\p{N}"
_LETTERS_WITH_CASE = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of DeepSeek-LLM's tokenizer, from an older Unicode version without modern Georgian."""
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    """Splits text at the matches of regular expressions, which are applied in order."""
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    return (*(kind | {"pattern": {"Regex": pattern}} for pattern in patterns), _BYTES)


def _words(numbers: str, letters: str = r"\p{L}+", marks: str = _MARKS) -> tuple[dict[str, Any], ...]:
    """Splits text into words, numbers, marks, spaces and the endings of English contractions; a word includes a mark or
    space before it.
    """
    return _split("|".join((_ENDINGS, _BEFORE + letters, numbers, marks, _SPACES)))


def _by_case(ending: str, numbers: str) -> tuple[dict[str, Any], ...]:
    """Splits as `_words` does, and also before an upper-case letter that follows a lower-case letter."""
    words = (f"{_BEFORE}{letters}{ending}" for letters in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
    return _split("|".join((*words, numbers, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)))


_GPT2 = Splits((_WORDS_OF_GPT2,))
_SINGLE_DIGITS = Splits((_DIGITS, _WORDS_OF_GPT2))
_CL100K = Splits(_words(_BY_THREE))
_LLAMA3 = _CL100K._replace(keeps_words=True, begins=True)
_QWEN2 = Splits(_words(_BY_ONE), is_composed=True)
_O200K = Splits(_by_case(f"{_ENDINGS}?", _BY_THREE))
_BLOOM = Splits(_split(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"))
_DEEPSEEK_V3 = Splits(
    _split(
        _BY_THREE,
        _CHINESE_AND_JAPANESE,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

PRE_TOKENIZERS: dict[str, Splits] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum"), _GPT2),
    "olmo": _GPT2._replace(is_composed=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone"), _SINGLE_DIGITS),
    "command-r": _SINGLE_DIGITS._replace(is_composed=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    "smaug-bpe": _CL100K._replace(keeps_words=True),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": Splits(
        _words(_BY_ONE, r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        is_composed=True,
    ),
    "hunyuan": _QWEN2._replace(is_composed=False),
    "seed-coder": Splits(_words(_BY_ONE, marks=r" ?[^\s\p{L}\p{N}\r\n]+")),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": Splits(_by_case("", _BY_ONE), keeps_words=True, begins=True),
    "deepseek-llm": Splits(
        _split(
            r"[\r\n]",
            rf"\s?[{_LETTERS_WITH_CASE}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Splits(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _BY_ONE)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
}
