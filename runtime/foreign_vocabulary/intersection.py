"""Token-level intersection of two vocabularies (TLI; Timor et al., arXiv:2502.05202, algorithm 4).

A draft model with its own tokenizer drafts only tokens that both vocabularies spell by the same bytes. Pieces are
compared as bytes, because byte-level BPE and SentencePiece write one text differently. Special tokens are compared
with special tokens: by their text, then bos with bos and eos with eos.

Every token of the verifier takes exactly one position of the draft model, so that the draft KV keeps the verifier's
positions and block tables, and no text is tokenized while drafting. A context token outside of the intersection is
therefore represented by one draft token: the longest one that ends the text of the context token, since the next token
continues that end. Re-encoding would give several draft tokens. A token without text, or a special token without
counterpart, becomes the draft model's eos token, a boundary that the model was trained on. Where the draft model's
tokenizer begins every text with bos, bos replaces the first token of the context: Gemma, for one, drafts badly without
it. Approximate contexts lower acceptance; the text is always the verifier's.

WordPiece vocabularies are not handled: `##` is compared as text.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from wingbeat.runtime.heads.vocabulary import SharedTokens, VocabularyError
from wingbeat.runtime.tensor_files import read_json
from wingbeat.runtime.tokenizer import piece_reader
from wingbeat.runtime.tokenizer_file import FILE

logger = logging.getLogger(__name__)

MIN_SHARE = 0.05
"""Least share of the verifier's tokens that the draft model must have. 32,000 tokens of an English vocabulary are a
tenth of the largest vocabularies; unrelated vocabularies share bytes and letters, less than a hundredth."""
_SETTINGS = "tokenizer_config.json"


class Vocabulary(NamedTuple):
    """Tokens of a checkpoint that have an embedding."""

    ids: dict[bytes, int]
    """Ids by text. Where a byte piece has the text of another piece, the other piece's id."""
    texts: dict[int, bytes]
    """Text of every token but special ones; may be part of a character."""
    special: dict[str, int]
    roles: tuple[str | None, str | None]
    """Names of the bos and eos tokens."""
    first: int | None
    """Id of the bos token if the tokenizer puts it before every text."""

    @classmethod
    def read(cls, folder: Path, size: int) -> "Vocabulary":
        """Read a checkpoint's tokenizer; ids from `size` on are dropped."""
        backend = Tokenizer.from_file(str(folder / FILE))
        bytes_of, added = piece_reader(backend), backend.get_added_tokens_decoder()
        pieces = backend.get_vocab(with_added_tokens=False).items()
        texts = {token_id: bytes_of(piece) for piece, token_id in pieces}
        texts |= {token_id: token.content.encode() for token_id, token in added.items()}
        special = {token.content: token_id for token_id, token in added.items() if token.special and token_id < size}
        texts = {i: text for i, text in texts.items() if i < size and not (i in added and added[i].special)}
        # Later entries win: byte pieces come first.
        is_byte = {token_id: piece.startswith("<0x") for piece, token_id in pieces}
        ordered = sorted(texts, key=lambda token_id: (not is_byte.get(token_id, False), -token_id))
        settings = read_json(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        roles = _content(settings.get("bos_token")), _content(settings.get("eos_token"))
        ids = {texts[token_id]: token_id for token_id in ordered if texts[token_id]}
        bos = special.get(roles[0])
        return cls(ids, texts, special, roles, bos if backend.encode("").ids[:1] == [bos] else None)

    def closest(self, text: bytes) -> int | None:
        """Id of the longest token that ends a text."""
        ends = (self.ids.get(text[begin:]) for begin in range(len(text)))
        return next((token_id for token_id in ends if token_id is not None), None)


def shared_tokens(draft: Path, draft_size: int, target: Path, target_size: int) -> SharedTokens | None:
    """Intersect the vocabularies of a draft model and a verifier; None if a folder has no tokenizer.json.

    Args:
        draft_size, target_size: rows of the models' embeddings.

    Raises:
        VocabularyError: the two share less than `MIN_SHARE` of the verifier's tokens.
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
    """Draft ids of special tokens by target id; a role counts where neither vocabulary has the other's token."""
    pairs = {ours.special[text]: theirs.special[text] for text in ours.special.keys() & theirs.special.keys()}
    for our_text, their_text in zip(ours.roles, theirs.roles, strict=True):
        target_id, draft_id = ours.special.get(our_text), theirs.special.get(their_text)
        if None not in (target_id, draft_id) and target_id not in pairs and draft_id not in pairs.values():
            pairs[target_id] = draft_id
    return pairs


def _content(token: Any) -> str | None:
    """Text of a special token in tokenizer_config.json."""
    return token.get("content") if isinstance(token, dict) else token
