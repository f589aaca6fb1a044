"""Finds text that a grammar forces, token by token. The search has a limit, because forced text may be endless."""

import codecs
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wingbeat.runtime.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_STEPS = 128
"""Maximum number of tokens of a walk."""
MOST_WALK_S = 0.002
"""CPU seconds after which a walk stops."""
_MOST_SPELLINGS = 64
"""Maximum number of different tokens with which forced text may begin; with more, the text is not searched."""


class CertainWalk(NamedTuple):
    """Tokens that a grammar forces."""

    token_ids: list[int]
    goes_on: bool
    """Whether the walk stopped at a limit although the grammar forces more text."""


def only_text(mask: np.ndarray, table: Vocabulary) -> int | None:
    """The shortest allowed token, if the texts of all other allowed tokens begin with that token's text; None if the
    grammar leaves a choice.

    Args:
        mask: int32 [ceil(vocab_size / 32)].
    """
    words = np.flatnonzero(mask)
    if not 0 < len(words) <= _MOST_SPELLINGS:
        return None
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
    rows, columns = bits.nonzero()
    if len(rows) > _MOST_SPELLINGS:
        return None
    token_ids = (words[rows] * 32 + columns).tolist()
    texts, stops = table.texts, table.stop_token_ids
    shortest = min(token_ids, key=lambda token_id: len(texts[token_id]))
    text = texts[shortest]
    is_only = text and all(texts[token_id].startswith(text) and token_id not in stops for token_id in token_ids)
    return shortest if is_only else None


def walk(matcher: "LLMatcher", first: int, table: Vocabulary) -> CertainWalk:
    """Advances the matcher by token `first`, and then by the shortest allowed token as long as the grammar leaves no
    choice.
    """
    mask, token_ids, until = np.zeros(table.num_words, np.int32), [], time.thread_time() + MOST_WALK_S
    following: int | None = first
    while following is not None and len(token_ids) < MOST_STEPS and time.thread_time() < until:
        if matcher.try_consume_tokens([following]) != 1:
            break
        token_ids.append(following)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        following = None if matcher.is_error() else only_text(mask, table)
    return CertainWalk(token_ids, following is not None)


def spelled(found: CertainWalk, table: Vocabulary) -> list[int]:
    """Token ids that the tokenizer gives for the walk's text.

    If the text begins inside a character, the tokens of that character's bytes are kept.
    """
    texts, start = [table.texts[token_id] for token_id in found.token_ids], 0
    while start < len(texts) and texts[start][0] & 0xC0 == 0x80:
        start += 1
    try:
        # The decoder is incremental, because the last character may be incomplete.
        text = codecs.getincrementaldecoder("utf-8")().decode(b"".join(texts[start:]))
    except UnicodeDecodeError:
        return found.token_ids
    token_ids = [*found.token_ids[:start], *table.encode(text)]
    # If the walk stopped at a limit, the last token is dropped, because the tokenizer might join that token with the
    # text that follows.
    return token_ids[:-1] if found.goes_on else token_ids
