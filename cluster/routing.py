"""Chooses an engine for a request by cached prefixes and load, and computes limits of admission.

A block's hash covers the tokens of the block and of all blocks before it. So the longest cached prefix is found, as in
a radix tree, by looking up one block after another in a set of these hashes. This file uses neither Ray nor HTTP.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from wingbeat.runtime.kv.block_hashes import HASH_BYTES, CacheChanges, hash_block, salted_root, split_hashes

MAX_BLOCKS = 2**18
"""Maximum number of blocks tracked for each engine; if there are more, the oldest are dropped."""


class PromptBlocks:
    """Hashes of the full blocks of a prompt, computed on demand.

    Args:
        block_size: tokens per block; 0 if engines cache no prefixes.
        salt: cache salt of the request; only prompts with the same salt share prefixes.
        variant: digest of the request's variant; only prompts with the same variant share prefixes.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "", variant: str = "") -> None:
        self.num_tokens = len(token_ids)
        self.block_size = block_size
        # If the last token completes a block, that block does not count, because the engine always computes the last
        # token.
        self.num_blocks = max(0, len(token_ids) - 1) // block_size if block_size else 0
        self._token_ids = token_ids
        self._last = salted_root(salt, variant)
        self._hashes: list[bytes] = []

    def hash(self, index: int) -> bytes:
        """Hash of a block and all blocks before it."""
        while len(self._hashes) <= index:
            begin = len(self._hashes) * self.block_size
            self._last = hash_block(self._last, self._token_ids[begin : begin + self.block_size])
            self._hashes.append(self._last[:HASH_BYTES])
        return self._hashes[index]


class PrefixIndex:
    """Blocks that one engine has cached, kept up to date by the engine's `CacheChanges`."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, changes: CacheChanges) -> None:
        """Add the blocks that the engine's cache has gained, and remove the blocks that the cache has lost."""
        if changes.cleared:
            self._known.clear()
        for block_hash in split_hashes(changes.dropped):
            self._known.pop(block_hash, None)
        for block_hash in split_hashes(changes.cached):
            self._known[block_hash] = None
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def snapshot(self) -> CacheChanges:
        """Changes that, when applied to any other index, make that index equal to this one."""
        return CacheChanges(cleared=True, cached=b"".join(self._known))

    def num_cached_tokens(self, prompt: PromptBlocks) -> int:
        """Number of tokens at the prompt's beginning that the engine does not have to compute."""
        index = 0
        while index < prompt.num_blocks and prompt.hash(index) in self._known:
            index += 1
        return index * prompt.block_size


LONGEST_RETRY_S = 60
MAX_COMPARED = 16
"""If there are at most this many engines, all of them are compared. If there are more, only two random engines and the
engine with the longest cached prefix are compared, because otherwise all routers would send their requests to the same
least loaded engine at once.
"""


class EngineLoad(NamedTuple):
    """A live engine as its router sees it."""

    engine_id: str
    outstanding_tokens: int
    """Prompt tokens to compute and tokens still to generate, over all unfinished requests of the engine."""
    num_requests: int
    stalled: bool = False
    """Whether the engine makes no progress, and may have to be replaced."""


def moving(loads: list[EngineLoad]) -> list[EngineLoad]:
    """Loads of the engines that make progress; all loads if no engine makes progress."""
    return [load for load in loads if not load.stalled] or loads


def cost_tokens(num_prompt_tokens: int, num_cached_tokens: int, load: EngineLoad) -> int:
    """Tokens that an engine has to compute for the prompt, plus the engine's outstanding tokens."""
    return num_prompt_tokens - num_cached_tokens + load.outstanding_tokens


def choose_engine(
    loads: Sequence[EngineLoad],
    num_prompt_tokens: int = 0,
    num_cached_tokens: Callable[[str], int] = lambda engine_id: 0,
    session_id: str = "",
    rng: random.Random | None = None,
) -> str | None:
    """Id of the engine at which a request has the lowest `cost_tokens`; None if there are no engines.

    Among engines of equal cost, a session always prefers the same engine (`_affinity`). Without a session the engine
    with the fewest requests is chosen; if several engines have the fewest, the one with the lowest id.

    Args:
        num_cached_tokens: maps an engine's id to the number of prompt tokens whose KV it has cached.
        session_id: any string that requests of one conversation share; empty for none.
        rng: draws two engines if there are more than `MAX_COMPARED`. The drawn engines are compared with the engine
            that has the longest cached prefix.
    """

    def rank(load: EngineLoad) -> tuple:
        cost = cost_tokens(num_prompt_tokens, num_cached_tokens(load.engine_id), load)
        tie = _affinity(session_id, load.engine_id) if session_id else load.num_requests
        return cost, tie, load.engine_id

    if len(loads) > MAX_COMPARED:
        longest = max(loads, key=lambda load: (num_cached_tokens(load.engine_id), load.engine_id))
        loads = [*(rng or random).sample(loads, 2), longest]
    best = min(loads, key=rank, default=None)
    return None if best is None else best.engine_id


def _affinity(session_id: str, engine_id: str) -> bytes:
    """Key that ranks an engine among engines of equal cost for a session; independent of which other engines exist."""
    return blake2b(f"{session_id}\0{engine_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def num_missing_places(
    num_wanted: int, num_admitted: int, num_engines: int, max_num_seqs: int, max_queued_requests: int
) -> int:
    """Number of requests that have to end before `num_wanted` more requests are admitted; 0 if none has to end.

    Args:
        num_admitted: requests that run or queue.
        max_num_seqs: sequences that one engine runs at once.
        max_queued_requests: number of requests that may be admitted beyond those that the engines can run at once.
    """
    return max(0, num_admitted + num_wanted - num_engines * max_num_seqs - max_queued_requests)


def retry_after_s(num_missing: int, num_admitted: int, unwritten_tokens: int, tokens_per_s: float | None) -> int:
    """Whole seconds, 1 to 60, until `num_missing` requests will have ended.

    Engines are assumed to end requests at the rate `tokens_per_s` divided by the mean number of tokens that a request
    may still write.

    Args:
        num_missing: requests that have to end.
        num_admitted: requests that run or queue.
        unwritten_tokens: tokens that all admitted requests together may still write.
        tokens_per_s: tokens per second of all engines together; None before any measurement.
    """
    if not tokens_per_s or not num_admitted:
        return 1
    needed = unwritten_tokens * min(1.0, num_missing / num_admitted)
    return max(1, min(LONGEST_RETRY_S, math.ceil(needed / tokens_per_s)))


class AnswerLength:
    """Mean length of recent answers, which predicts how many tokens a request will still write.

    Args:
        num_answers: approximate number of recent answers over which the mean is taken.
    """

    def __init__(self, num_answers: int = 64) -> None:
        self._num_answers = num_answers
        self._num_seen = 0
        self._mean = 0.0

    def add(self, num_tokens: int) -> None:
        """Add the length of a finished answer."""
        self._num_seen += 1
        self._mean += (num_tokens - self._mean) / min(self._num_seen, self._num_answers)

    def expected_tokens(self, unwritten_tokens: int) -> int:
        """Expected number of further tokens of a request that may write at most `unwritten_tokens` more.

        The estimate does not depend on how many tokens the request has written.
        """
        return min(unwritten_tokens, math.ceil(self._mean)) if self._num_seen else unwritten_tokens


class TokenRate:
    """Tokens per second, averaged over recent time. Time without tokens to write does not count, and the weight of
    older tokens and older time decays.

    Args:
        window_s: seconds after which the weight of tokens and time has decayed to 1/e.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def resume(self, now: float) -> None:
        """Start measuring again after a pause; the time since the last token does not count."""
        self._at = now

    def add(self, num_tokens: int, now: float) -> None:
        """Add tokens that have arrived since the last call."""
        self._pass(now)
        self._tokens += num_tokens

    def per_s(self, now: float) -> float | None:
        """The current rate; None before any time has passed."""
        self._pass(now)
        return self.latest_per_s()

    def latest_per_s(self) -> float | None:
        """The rate when tokens last arrived; None before that."""
        return self._tokens / self._seconds if self._seconds else None

    def _pass(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else now - self._at
        kept = math.exp(-elapsed / self._window_s)
        self._tokens *= kept
        self._seconds = self._seconds * kept + elapsed
        self._at = now
