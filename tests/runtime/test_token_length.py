"""The bound on what one token stands for: it holds for texts made to break it, and is absent where none holds."""

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from tests.runtime.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from wingbeat.runtime.token_length import longest_token
from wingbeat.runtime.tokenizer import LONG_TEXT_CHARS, TextTooLong, Tokenizer

HARD_TEXTS = [
    "ll" * 3000,
    " w" * 3000,
    "<eos>" * 1000,
    "e\u0301" * 1000,
    "\u03b1\u0313\u0300\u0345" * 1000,
    "\u1112\u1161\u11ab" * 1000,
    "\u212a" * 1000,
    "🦋" * 1000,
    " " * 4000,
    "\r\n\t\u200b" * 1000,
]
NORMALIZERS = [
    None,
    normalizers.NFC(),
    normalizers.NFKC(),
    normalizers.NFD(),
    normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
    normalizers.Replace(" ", "▁"),
]


def backend_of(tokenizer: Tokenizer) -> BackendTokenizer:
    return tokenizer.hugging_face.backend_tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_no_token_stands_for_more_characters_than_the_bound(make, normalizer):
    backend = backend_of(make())
    if normalizer is not None:
        backend.normalizer = normalizer
    longest = longest_token(backend)
    for text in HARD_TEXTS:
        assert len(text) <= len(backend.encode(text, add_special_tokens=False)) * longest


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.StripAccents()),
        lambda b: setattr(b, "normalizer", normalizers.BertNormalizer()),
        lambda b: setattr(b, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda b: setattr(b, "normalizer", normalizers.Replace("ab", "c")),
        lambda b: setattr(b, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()])),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda b: setattr(b, "pre_tokenizer", None),
        lambda b: setattr(b, "model", models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        lambda b: setattr(b, "model", models.WordPiece({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        lambda b: setattr(b, "model", models.Unigram([("a", 0.0)], unk_id=0)),
        lambda b: b.add_tokens([AddedToken("<pad>", lstrip=True)]),
        lambda b: b.add_special_tokens([AddedToken("<mask>", rstrip=True)]),
    ],
)
def test_there_is_none_where_characters_can_vanish(change):
    backend = backend_of(byte_level_tokenizer())
    assert longest_token(backend) == 5
    change(backend)
    assert longest_token(backend) is None


def test_long_added_tokens_count():
    backend = backend_of(byte_level_tokenizer())
    backend.add_special_tokens(["<" + "x" * 40 + ">"])
    assert longest_token(backend) == 42


def test_a_text_that_cannot_fit_is_refused_unread_and_one_that_could_is_counted():
    tokenizer = byte_level_tokenizer()
    with pytest.raises(TextTooLong) as unread:
        tokenizer.encode("x" * 51, max_tokens=10)
    with pytest.raises(TextTooLong) as counted:
        tokenizer.encode("x" * 50, max_tokens=10)
    assert (unread.value.num_tokens, counted.value.num_tokens) == (None, 50)
    assert len(tokenizer.encode("<eos>" * 10, max_tokens=10)) == 10


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_long_texts_have_the_tokens_that_short_ones_have(make):
    tokenizer, text = make(), "hello world, é 🦋 " * (LONG_TEXT_CHARS // 10)
    assert len(text) > LONG_TEXT_CHARS
    assert tokenizer.encode(text) == backend_of(tokenizer).encode(text).ids
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == backend_of(tokenizer).encode(text, add_special_tokens=False).ids
    )
