"""A tokenizer's vocabulary for llguidance: bytes of the tokens, special tokens, and the tokens that end a text."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.runtime.vocabulary_pieces import piece_reader

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from wingbeat.runtime.tokenizer import Tokenizer


class Vocabulary(NamedTuple):
    """Tokens of a model."""

    tokens: "LLTokenizer"
    texts: Sequence[bytes]
    """Bytes by token id, one entry for each of the model's logits; an entry may be a part of a character, or empty."""
    special: dict[str, int]
    """Ids of special tokens by their text.

    The text parts of a grammar never match these tokens; structural tags name them.
    """
    stop_token_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """Number of int32 words in the mask of one node."""
        return -(-len(self.texts) // 32)

    @property
    def never(self) -> list[int]:
        """Ids of the tokens that no text of an answer contains: special tokens and tokens that end a text."""
        return sorted({*self.special.values(), *self.stop_token_ids})


class _Tokens:
    """Tokenizer interface for llguidance.

    Its encode function returns no tokens, which makes llguidance allow all tokenizations of a text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: Sequence[bytes], special: Sequence[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = texts, special, eos_token_id

    def __call__(self, text: str) -> list[int]:
        return []


def vocabulary_of(tokenizer: "Tokenizer", size: int, stop_token_ids: frozenset[int]) -> Vocabulary:
    """Vocabulary of a tokenizer, padded to `size` ids, with the tokens that end a text."""
    model = tokenizer.hugging_face
    pieces = model.convert_ids_to_tokens(list(range(min(len(model), size))))
    added = {token_id: token for token_id, token in model.added_tokens_decoder.items() if token_id < size}
    read = piece_reader(model.backend_tokenizer if model.is_fast else None)
    texts = [b"" if piece is None else read(piece) for piece in pieces]
    for token_id, token in added.items():
        texts[token_id] = token.content.encode()
    texts += [b""] * (size - len(texts))
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    special |= {
        token: token_id for token, token_id in zip(model.all_special_tokens, model.all_special_ids, strict=True)
    }

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return vocabulary(texts, {text: id_ for text, id_ in special.items() if id_ < size}, stop_token_ids, encode)


def vocabulary(
    texts: Sequence[bytes], special: dict[str, int], stop_token_ids: frozenset[int], encode: Callable[[str], list[int]]
) -> Vocabulary:
    """Builds a vocabulary from its tables."""
    # The import is here because it is slow and most servers never need llguidance.
    from llguidance import LLTokenizer

    made, stops = Vocabulary(None, texts, special, stop_token_ids, encode), sorted(stop_token_ids)
    wrapped = _Tokens(texts, made.never, stops[0])
    return made._replace(tokens=LLTokenizer(wrapped, eos_token=stops, slices=LLTokenizer.json_slices()))
