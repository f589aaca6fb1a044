"""Which engine gets a request, by the prefixes it has cached and its load; whether there is room, and when there is.

A block's hash is chained over all tokens before it, so that a set of hashes, looked up block by block, is a radix tree:
no tokens are known here, and neither Ray nor HTTP.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from wingbeat.runtime.kv.block_hashes import HASH_BYTES, CacheChanges, hash_block, salted_root, split_hashes

MAX_BLOCKS = 2**18
"""Known of one engine; beyond, those that were told first are forgotten."""


class PromptBlocks:
    """Hashes of a prompt's full blocks, made as far as somebody asks.

    Args:
        block_size: tokens per block; 0 where engines cache none.
        salt: of the request; prompts share prefixes with others of the same salt only.
        variant: digest of the request's; the same holds for it.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "", variant: str = "") -> None:
        self.num_tokens = len(token_ids)
        self.block_size = block_size
        # At least the last token is left to compute, as in the engine.
        self.num_blocks = max(0, len(token_ids) - 1) // block_size if block_size else 0
        self._token_ids = token_ids
        self._last = salted_root(salt, variant)
        self._hashes: list[bytes] = []

    def hash(self, index: int) -> bytes:
        """Of a block and all before it."""
        while len(self._hashes) <= index:
            begin = len(self._hashes) * self.block_size
            self._last = hash_block(self._last, self._token_ids[begin : begin + self.block_size])
            self._hashes.append(self._last[:HASH_BYTES])
        return self._hashes[index]


class PrefixIndex:
    """One engine's cached blocks, kept up by its `CacheChanges`."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, changes: CacheChanges) -> None:
        """Take over what the engine's cache has gained and lost."""
        if changes.cleared:
            self._known.clear()
        for block_hash in split_hashes(changes.dropped):
            self._known.pop(block_hash, None)
        for block_hash in split_hashes(changes.cached):
            self._known[block_hash] = None
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def snapshot(self) -> CacheChanges:
        """Changes that make any index equal to this one."""
        return CacheChanges(cleared=True, cached=b"".join(self._known))

    def num_cached_tokens(self, prompt: PromptBlocks) -> int:
        """Tokens at the prompt's beginning that the engine does not have to compute."""
        index = 0
        while index < prompt.num_blocks and prompt.hash(index) in self._known:
            index += 1
        return index * prompt.block_size


LONGEST_RETRY_S = 60
MAX_COMPARED = 16
"""Engines that are all compared. Of more, two are drawn: several routers would flood the one least loaded engine."""


class EngineLoad(NamedTuple):
    """One live engine as its router sees it."""

    engine_id: str
    outstanding_tokens: int
    """Prompt tokens to compute and tokens still to generate of the requests there that are not finished."""
    num_requests: int
    stalled: bool = False
    """Whether it makes no progress, and may have to be replaced."""


def moving(loads: list[EngineLoad]) -> list[EngineLoad]:
    """Those that make progress; all of them where none does."""
    return [load for load in loads if not load.stalled] or loads


def cost_tokens(num_prompt_tokens: int, num_cached_tokens: int, load: EngineLoad) -> int:
    """What an engine has to do before a request's first token, and beside its others, in tokens."""
    return num_prompt_tokens - num_cached_tokens + load.outstanding_tokens


def choose_engine(
    loads: Sequence[EngineLoad],
    num_prompt_tokens: int = 0,
    num_cached_tokens: Callable[[str], int] = lambda engine_id: 0,
    session_id: str = "",
    rng: random.Random | None = None,
) -> str | None:
    """Id of the engine at which a request costs least; None without engines.

    At equal costs a session keeps to one engine; without a session the fewest requests decide, then the id.

    Args:
        num_cached_tokens: by engine, tokens of the prompt whose KV is there.
        session_id: whatever requests of one conversation have in common; empty for none.
        rng: draws two of more than `MAX_COMPARED` engines; one that has the longest prefix is compared too.
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
    """Orders engines in another way for each session; an engine that comes or goes changes no other's place."""
    return blake2b(f"{session_id}\0{engine_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def num_missing_places(
    num_wanted: int, num_admitted: int, num_engines: int, max_num_seqs: int, max_queued_requests: int
) -> int:
    """Requests that have to end before `num_wanted` more find room; 0 where they fit now.

    Args:
        num_admitted: requests that run or queue.
        max_num_seqs: sequences one engine runs at once.
        max_queued_requests: requests beyond the engines' running capacity.
    """
    return max(0, num_admitted + num_wanted - num_engines * max_num_seqs - max_queued_requests)


def retry_after_s(num_missing: int, num_admitted: int, unwritten_tokens: int, tokens_per_s: float | None) -> int:
    """Whole seconds, 1 to 60, until so many requests will have ended.

    Engines end requests at the rate at which they write tokens, over the tokens that one request still needs.

    Args:
        num_missing: requests that have to end.
        num_admitted: requests that run or queue.
        unwritten_tokens: tokens they may still write, all together.
        tokens_per_s: of all engines together; None before anything was measured.
    """
    if not tokens_per_s or not num_admitted:
        return 1
    needed = unwritten_tokens * min(1.0, num_missing / num_admitted)
    return max(1, min(LONGEST_RETRY_S, math.ceil(needed / tokens_per_s)))


class AnswerLength:
    """How many tokens answers have, from those of late: what a request will still write, where it may write more.

    Args:
        num_answers: over which the mean is taken, about.
    """

    def __init__(self, num_answers: int = 64) -> None:
        self._num_answers = num_answers
        self._num_seen = 0
        self._mean = 0.0

    def add(self, num_tokens: int) -> None:
        """An answer has ended."""
        self._num_seen += 1
        self._mean += (num_tokens - self._mean) / min(self._num_seen, self._num_answers)

    def expected_tokens(self, unwritten_tokens: int) -> int:
        """Of a request that may write so many more. How many it has written says little of how many will follow."""
        return min(unwritten_tokens, math.ceil(self._mean)) if self._num_seen else unwritten_tokens


class TokenRate:
    """Tokens per second over the latest seconds in which there was something to write; older ones fade out.

    Args:
        window_s: seconds after which a token counts 1/e.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._at: float | None = None

    def resume(self, now: float) -> None:
        """There is something to write again: the time since the last token was no time of writing."""
        self._at = now

    def add(self, num_tokens: int, now: float) -> None:
        """Tokens have arrived."""
        self._pass(now)
        self._tokens += num_tokens

    def per_s(self, now: float) -> float | None:
        """The rate; None before any time has passed."""
        self._pass(now)
        return self.latest_per_s()

    def latest_per_s(self) -> float | None:
        """The rate as it was when tokens last came; None before that."""
        return self._tokens / self._seconds if self._seconds else None

    def _pass(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else now - self._at
        kept = math.exp(-elapsed / self._window_s)
        self._tokens *= kept
        self._seconds = self._seconds * kept + elapsed
        self._at = now
