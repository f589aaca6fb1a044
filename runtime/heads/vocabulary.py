"""Checks that a draft model and its verifier have the same vocabulary, because drafts are sent as token ids. Runtime
parts may translate between different vocabularies.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_NUM_NAMED = 3


class VocabularyError(ValueError):
    """Two checkpoints number their tokens differently; the message names the differing tokens."""


class SharedTokens(NamedTuple):
    """Tokens that a verifier and a draft model of another vocabulary share; tensors are int64."""

    draft_ids: Tensor
    """[target_vocab_size]: for each target token id, the draft token id that replaces it in a context."""
    columns: Tensor
    """[num_shared]: draft token ids that may be drafted."""
    target_ids: Tensor
    """[num_shared]: target token ids of `columns`, ascending."""
    first: int | None = None
    """Draft token id that replaces the first token of each context; None keeps that token."""

    def to(self, device: torch.device) -> "SharedTokens":
        """Copies the tables to a device."""
        return SharedTokens(*(table.to(device) for table in self[:3]), self.first)

    def read(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Translates target token ids, which stand at `positions` of their contexts, to draft token ids."""
        draft_ids = self.draft_ids[token_ids]
        return draft_ids if self.first is None else torch.where(positions == 0, self.first, draft_ids)


def check_same_vocabulary(draft: Path, draft_vocab_size: int, target: Path, target_vocab_size: int) -> None:
    """Compare the tokenizers of two checkpoint folders, or the vocabulary sizes if a tokenizer is missing.

    If both tokenizers exist and are equal, the output matrices may differ in size, because the larger matrix is only
    padded.

    Raises:
        VocabularyError: the tokenizers differ, or one is missing and the sizes differ.
    """
    if not ((draft / _FILE).is_file() and (target / _FILE).is_file()):
        without = ", ".join(str(folder) for folder in (draft, target) if not (folder / _FILE).is_file())
        if draft_vocab_size != target_vocab_size:
            raise VocabularyError(
                f"the draft model {draft} has another vocabulary than the verifier {target}: {draft_vocab_size} and "
                f"{target_vocab_size} tokens, and no {_FILE} in {without} to show that the difference is padding"
            )
        logger.warning("no %s in %s: only the sizes of the vocabularies were compared", _FILE, without)
        return
    theirs, ours = (Tokenizer.from_file(str(folder / _FILE)).get_vocab() for folder in (draft, target))
    if theirs == ours:
        return
    differing = sorted(
        (token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)),
        key=lambda token: (ours.get(token, target_vocab_size), token),
    )
    named = ", ".join(
        f"{token!r} is {_id(theirs, token)} there and {_id(ours, token)} here" for token in differing[:_NUM_NAMED]
    )
    raise VocabularyError(
        f"the draft model {draft} has another vocabulary than the verifier {target}: {len(theirs)} and {len(ours)} "
        f"tokens, of which {len(differing)} differ ({named})"
    )


def _id(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "no token"
