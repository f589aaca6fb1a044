"""Token-level intersection of two vocabularies (TLI; Timor et al., arXiv:2502.05202, algorithm 4).

A draft model with its own tokenizer drafts only tokens that both vocabularies spell by the same bytes. Pieces are
compared as bytes, because byte-level BPE and SentencePiece write one text differently. Special tokens are paired only
with special tokens: first tokens of equal text, then bos with bos and eos with eos.

Each token of the verifier takes exactly one position of the draft model, so that the draft KV can use the verifier's
positions and block tables, and no text is tokenized while drafting. A context token outside the intersection is
therefore represented by a single draft token, although re-encoding its text would give several. The draft token is the
longest token whose text is a suffix of the context token's text, because the next token continues that suffix. A
context token for which there is no such draft token, or a special token without counterpart, becomes the draft model's
eos token, because the draft model was trained on eos as a boundary. If the draft model's tokenizer begins every text
with bos, bos replaces the first token of the context, because some models (such as Gemma) draft badly without bos.
Approximate contexts lower the acceptance rate, but never change the generated text.

WordPiece vocabularies are not handled: the prefix `##` of a piece is compared as if it were text.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from wingbeat.runtime.heads.vocabulary import SharedTokens, VocabularyError
from wingbeat.runtime.tensor_files import read_json
from wingbeat.runtime.tokenizer_file import FILE
from wingbeat.runtime.vocabulary_pieces import piece_reader

logger = logging.getLogger(__name__)

MIN_SHARE = 0.05
"""Minimum fraction of the verifier's tokens that must also be in the draft model's vocabulary. An English vocabulary of
32,000 tokens has a tenth of the tokens of the largest vocabularies. Unrelated vocabularies share only bytes and
letters, which are less than a hundredth.
"""
MOST_BYTES = 64
"""Maximum length of a token that represents another one, so that a file with huge tokens loads in linear time."""
_SETTINGS = "tokenizer_config.json"


class Vocabulary(NamedTuple):
    """Tokens of a checkpoint that have an embedding."""

    ids: dict[bytes, int]
    """Token ids by text. If a byte piece and another piece have the same text, the id is that of the other piece."""
    texts: dict[int, bytes]
    """Texts of all tokens except special tokens, by token id. A text may be a part of a character."""
    special: dict[str, int]
    roles: tuple[str | None, str | None]
    """Names of the bos and eos tokens."""
    first: int | None
    """Id of the bos token if the tokenizer puts bos before every text; else None."""

    @classmethod
    def read(cls, folder: Path, size: int) -> "Vocabulary":
        """Reads a checkpoint's tokenizer; token ids of at least `size` are dropped."""
        backend = Tokenizer.from_file(str(folder / FILE))
        bytes_of, added = piece_reader(backend), backend.get_added_tokens_decoder()
        pieces = backend.get_vocab(with_added_tokens=False).items()
        texts = {token_id: bytes_of(piece) for piece, token_id in pieces}
        texts |= {token_id: token.content.encode() for token_id, token in added.items()}
        special = {token.content: token_id for token_id, token in added.items() if token.special and token_id < size}
        texts = {i: text for i, text in texts.items() if i < size and not (i in added and added[i].special)}
        # If texts are equal, later entries replace earlier ones. Byte pieces therefore come first.
        is_byte = {token_id: piece.startswith("<0x") for piece, token_id in pieces}
        ordered = sorted(texts, key=lambda token_id: (not is_byte.get(token_id, False), -token_id))
        settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        roles = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
        ids = {texts[token_id]: token_id for token_id in ordered if texts[token_id]}
        bos = special.get(roles[0])
        return cls(ids, texts, special, roles, bos if backend.encode("").ids[:1] == [bos] else None)

    def closest(self, text: bytes) -> int | None:
        """Returns the id of the longest token of at most `MOST_BYTES` whose text is a suffix of the given text; None if
        there is none.
        """
        end = text[-MOST_BYTES:]
        ends = (self.ids.get(end[begin:]) for begin in range(len(end)))
        return next((token_id for token_id in ends if token_id is not None), None)


def shared_tokens(draft: Path, draft_size: int, target: Path, target_size: int) -> SharedTokens | None:
    """Returns the tokens that a draft model and a verifier share; None if a folder has no tokenizer.json.

    Args:
        draft_size, target_size: numbers of rows of the models' embeddings.

    Raises:
        VocabularyError: the models share less than `MIN_SHARE` of the verifier's tokens.
    """
    if not all((folder / FILE).is_file() for folder in (draft, target)):
        return None
    theirs, ours = Vocabulary.read(draft, draft_size), Vocabulary.read(target, target_size)
    special = _special_pairs(theirs, ours)
    pairs = {ours.ids[text]: theirs.ids[text] for text in ours.ids.keys() & theirs.ids.keys()} | special
    num_ours, num_theirs = (len(each.texts) + len(each.special) for each in (ours, theirs))
    share = len(pairs) / max(num_ours, 1)
    common = (
        f"the draft model {draft} has another vocabulary than the verifier {target}: {len(pairs)} of the verifier's "
        f"{num_ours} tokens ({100 * share:.2g} %) are among the draft model's {num_theirs}"
    )
    if share < MIN_SHARE:
        raise VocabularyError(
            f"{common}, and drafting needs {100 * MIN_SHARE:.0f} %: give a draft model whose tokenizer has more of "
            "them, or the drafter 'ngram'"
        )
    logger.info("%s: only those are drafted", common)
    bos, eos = (theirs.special.get(role) for role in theirs.roles)
    unknown = next((token_id for token_id in (eos, bos) if token_id is not None), 0)
    draft_ids = [unknown] * target_size
    for token_id, text in ours.texts.items():
        if token_id not in pairs and (found := theirs.closest(text)) is not None:
            draft_ids[token_id] = found
    target_ids = sorted(pairs)
    for token_id in target_ids:
        draft_ids[token_id] = pairs[token_id]
    columns = [pairs[token_id] for token_id in target_ids]
    return SharedTokens(*map(torch.tensor, (draft_ids, columns, target_ids)), theirs.first)


def _special_pairs(theirs: Vocabulary, ours: Vocabulary) -> dict[int, int]:
    """Returns the draft model's ids of special tokens, by the verifier's ids.

    Tokens are paired by text; bos and eos tokens that are then unpaired are paired by role.
    """
    pairs = {ours.special[text]: theirs.special[text] for text in ours.special.keys() & theirs.special.keys()}
    for our_text, their_text in zip(ours.roles, theirs.roles, strict=True):
        target_id, draft_id = ours.special.get(our_text), theirs.special.get(their_text)
        if None not in (target_id, draft_id) and target_id not in pairs and draft_id not in pairs.values():
            pairs[target_id] = draft_id
    return pairs


def _content(token: Any) -> str | None:
    """Returns the text of a special token from its entry in tokenizer_config.json."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
