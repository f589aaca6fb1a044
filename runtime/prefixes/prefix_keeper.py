"""Pinned prefixes of an engine, which are computed by requests that the engine creates, or read from disk.

All calls come from the engine's thread, between two rounds; a separate thread writes files.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from wingbeat.runtime.kv.block_hashes import salted_root
from wingbeat.runtime.kv.blocks import NoFreeBlocks
from wingbeat.runtime.prefixes.contents import Contents, PrefixContents
from wingbeat.runtime.prefixes.prefix_files import MOST_SPAN_BYTES
from wingbeat.runtime.prefixes.prefix_store import PrefixStore
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.round.rows import keeping
from wingbeat.runtime.scheduling.request import Request, RequestOutput, SamplingParams, Variant

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine

logger = logging.getLogger(__name__)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
INVALID, NO_ROOM = "invalid_value", "pinned_memory_exceeded"

Key = tuple[str, int]
"""Name and version of a prefix; while a version replaces another, both versions may be present."""


class Refusal(NamedTuple):
    """Reason why a prefix is not pinned."""

    code: str
    """INVALID or NO_ROOM."""
    reason: str
    """Text that completes a sentence after the prefix's name."""


@dataclass
class _Pinned:
    """A pinned prefix."""

    prefix: SavedPrefix
    blocks: list[int]
    taps: Tensor | None
    """Taps for a drafter; None if drafters need no taps, or if the file of the prefix has no taps."""
    path: Path | None = None
    """File of the prefix; None before the file is written."""
    is_kept: bool = False
    """Whether the prefix is on disk or is being written."""


@dataclass
class _Computing:
    """A prefix that is being computed: its request runs or waits."""

    prefix: SavedPrefix
    num_blocks: int
    num_new: int
    """Number of blocks of the prefix that are not pinned yet."""
    done: "Future[Refusal | None]"


class PrefixKeeper:
    """Owner of an engine's pinned prefixes.

    Args:
        store: folder on disk for prefixes; None keeps prefixes only in memory.
        max_pinned_tokens: maximum number of pinned tokens of all prefixes; None allows a quarter of the blocks.

    Raises:
        ValueError: the settings leave too few blocks for a sequence of max_model_len beside pinned prefixes. The
            message names the setting to change.
    """

    def __init__(
        self, engine: "Engine", store: PrefixStore | None = None, max_pinned_tokens: int | None = None
    ) -> None:
        self._engine = engine
        self._blocks = engine.block_manager
        self._states = keeping(engine.features)
        self._contents = PrefixContents(engine.cache, self._states, engine.contexts, engine.needs)
        self._store = store
        self.max_blocks = most_pinned_blocks(engine, max_pinned_tokens)
        self._pinned: dict[Key, _Pinned] = {}
        self._latest: dict[str, int] = {}
        """Latest version that was kept or deleted, by name."""
        self._computing: dict[str, _Computing] = {}
        """Prefixes being computed, by request id."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-prefixes")

    def open(self, variants: Iterable[Variant] = ()) -> list[SavedPrefix]:
        """Pins each prefix that is on disk, or starts to compute the prefix; returns all prefixes that are on disk.

        Args:
            variants: variants that are served; a prefix of a variant is assigned to the served variant with the same
                name.
        """
        by_name = {variant.name: variant for variant in variants}
        found = []
        for prefix in [] if self._store is None else self._store.records():
            own = prefix.variant and by_name.get(prefix.variant.name, prefix.variant)
            found.append(prefix._replace(variant=own))
            self._latest[prefix.name] = prefix.version
            self._start(found[-1], is_new=False)
        return found

    def save(self, prefix: SavedPrefix) -> "Future[Refusal | None]":
        """Pins a prefix: loads the contents from the prefix's file if the file matches, else computes the contents.

        The prefix is not written to disk; `keep` does that.

        The result of the future is a refusal, or None once the prefix is pinned.
        """
        done: Future[Refusal | None] = Future()
        if self._key(prefix) in self._pinned:
            done.set_result(None)
            return done
        for computing in self._computing.values():
            if computing.prefix == prefix:
                return computing.done
        num_blocks = prefix.num_blocks(self._blocks.block_size)
        pinned = map(self._blocks.is_pinned, self._blocks.find(prefix.hashed_ids, self._root(prefix)))
        num_new = num_blocks - sum(pinned)
        if (refusal := self._refusal(prefix, num_blocks, num_new)) is not None:
            done.set_result(refusal)
        elif self._restore(prefix, num_blocks):
            done.set_result(None)
        else:
            self._compute(_Computing(prefix, num_blocks, num_new, done))
        return done

    def keep(self, entries: Iterable[tuple[str, int, SavedPrefix | None]]) -> "Future[None]":
        """Sets which prefixes are kept under which names; None deletes a name.

        Prefixes that are not pinned yet are pinned; replaced and deleted prefixes are unpinned. The future is done once
        prefixes that were already pinned have been written.
        """
        for name, version, prefix in entries:
            if version < self._latest.get(name, 0):
                continue
            self._latest[name] = version
            for key in [key for key in self._pinned if key[0] == name and (key[1] < version or prefix is None)]:
                self._unpin(key)
            for request_id, computing in list(self._computing.items()):
                if computing.prefix.name == name and (computing.prefix.version < version or prefix is None):
                    self._give_up(request_id, "was deleted or replaced meanwhile")
            if prefix is not None:
                self._start(prefix, is_new=True)
            elif self._store is not None:
                self._writer.submit(self._store.delete, name, version)
        return self._writer.submit(lambda: None)

    def drop(self, name: str, version: int) -> None:
        """Unpins a prefix that is not to be kept, or stops computing it; does nothing if there is no such prefix."""
        if (name, version) in self._pinned:
            self._unpin((name, version))
        for request_id, computing in list(self._computing.items()):
            if self._key(computing.prefix) == (name, version):
                self._give_up(request_id, "is not to be kept")

    def stored(self, name: str) -> SavedPrefix | None:
        """Returns the prefix with this name that is on disk; None if there is none."""
        return None if self._store is None else self._store.record(name)

    def take(self, output: RequestOutput) -> None:
        """Receives the outputs of all requests.

        A prefix is pinned once the request that computes the prefix has finished.
        """
        if output.finish_reason is None or output.request_id not in self._computing:
            return
        if output.failure is not None:
            self._give_up(output.request_id, f"could not be computed: {output.failure}")
            return
        computed, taps = self._end(output.request_id)
        refusal = None
        try:
            self._pin(computed.prefix, computed.num_blocks, taps)
        except (RuntimeError, KeyError) as error:  # raised, for example, if no row was free for the recurrent state
            refusal = Refusal(INVALID, f"could not be pinned: {error}")
        computed.done.set_result(refusal)

    def describe(self) -> dict[str, Any]:
        """Returns a report for people: the pinned prefixes, and the numbers of pinned and allowed tokens."""
        size = self._blocks.block_size
        return {
            "pinned_tokens": self._blocks.num_pinned * size,
            "max_pinned_tokens": self.max_blocks * size,
            "prefixes": [
                {
                    "name": pinned.prefix.name,
                    "version": pinned.prefix.version,
                    "blocks": len(pinned.blocks),
                    "bytes": self._contents.num_bytes(len(pinned.blocks)),
                    "saved": None if pinned.path is None else str(pinned.path),
                }
                for pinned in self._pinned.values()
            ],
        }

    def close(self) -> None:
        """Waits until pending files are written."""
        self._writer.shutdown()

    def _start(self, prefix: SavedPrefix, is_new: bool) -> None:
        """Pins a prefix that is to be kept, now or after the prefix has been computed.

        Writes the files of the prefix that are not on disk yet.

        Args:
            is_new: whether the prefix may differ from the prefix of this name on disk.
        """
        self.save(prefix).add_done_callback(lambda done: self._started(prefix, is_new, done))

    def _started(self, prefix: SavedPrefix, is_new: bool, done: "Future[Refusal | None]") -> None:
        if (refusal := done.result()) is not None:
            logger.warning("Prefix %s is not pinned: it %s", prefix.name, refusal.reason)
            return
        pinned = self._pinned[self._key(prefix)]
        if self._store is None or pinned.is_kept:
            return
        pinned.is_kept = True
        reads = pinned.path is None and self._store.has_contents
        contents = self._contents.read(pinned.blocks, pinned.taps) if reads else None
        if is_new or reads:
            self._writer.submit(self._write, pinned, contents)

    def _write(self, pinned: _Pinned, contents: Contents | None) -> None:
        pinned.path = self._store.write(pinned.prefix, contents)

    def _refusal(self, prefix: SavedPrefix, num_blocks: int, num_new: int) -> Refusal | None:
        size, states = self._blocks.block_size, self._blocks.beside
        if not self._blocks.enable_prefix_caching:
            return Refusal(INVALID, "cannot be kept: this server caches no prefixes")
        if not num_blocks:
            return Refusal(INVALID, f"has {len(prefix.token_ids)} tokens: a prefix needs at least {size}, one KV block")
        if num_blocks * size >= self._engine.config.max_model_len:
            longest = self._engine.config.max_model_len
            return Refusal(INVALID, f"has {len(prefix.token_ids)} tokens: max_model_len is {longest}")
        if (num_bytes := sum(one.num_bytes for one in prefix.spans)) > MOST_SPAN_BYTES:
            made = f"its images or audio are {num_bytes >> 20} MiB as tensors"
            return Refusal(INVALID, f"cannot be kept: {made}, and at most {MOST_SPAN_BYTES >> 20} MiB are kept")
        left = self.max_blocks - self._blocks.num_pinned - sum(one.num_new for one in self._computing.values())
        if num_new > left:
            return Refusal(
                NO_ROOM,
                f"needs {num_new * size} more pinned tokens: {max(left, 0) * size} of {self.max_blocks * size} "
                "(max_pinned_tokens) are left",
            )
        if states is not None and states.num_pinned + len(self._computing) >= states.most_pinned:
            return Refusal(
                NO_ROOM, f"needs one more pinned state: {states.most_pinned} of {states.num_rows} may be pinned"
            )
        return None

    def _restore(self, prefix: SavedPrefix, num_blocks: int) -> bool:
        """Loads a prefix's contents from its file into KV blocks and pins these blocks.

        Returns False if that is not possible.
        """
        if self._store is None:
            return False
        contents = self._store.contents(prefix, lambda found: self._contents.mismatch(num_blocks, found))
        if contents is None:
            return False
        try:
            blocks = self._blocks.allocate(num_blocks)
        except NoFreeBlocks:
            return False
        try:
            if not self._contents.write(blocks, contents):
                return False
            size, parent, hashed = self._blocks.block_size, self._root(prefix), prefix.hashed_ids
            for index, block_id in enumerate(blocks):
                tokens = hashed[index * size : (index + 1) * size]
                parent = self._blocks.register(block_id, parent, tokens)
            self._pin(prefix, num_blocks, self._contents.taps_in(contents)).path = self._store.path(prefix)
        finally:
            self._blocks.release(blocks)
        return True

    def _compute(self, computing: _Computing) -> None:
        prefix, num_tokens = computing.prefix, computing.num_blocks * self._blocks.block_size
        request_id = f"prefix {prefix.name} {prefix.version}"
        # The whole prefix is computed for a drafter that needs taps, because taps are not in the prefix cache.
        fresh = self._engine.needs.keeps_context
        tokens = prefix.token_ids[:num_tokens]
        spans = tuple(one for one in prefix.spans if one.end < num_tokens)
        request = Request(request_id, tokens, ONE_TOKEN, variant=prefix.variant, fresh=fresh, spans=spans)
        try:
            self._engine.add_request(request)
        except ValueError as error:
            computing.done.set_result(Refusal(INVALID, f"cannot be computed: {error}"))
            return
        self._computing[request_id] = computing
        if fresh:
            self._engine.contexts.record(request_id)
        if self._states is not None:
            self._states.marks[request_id] = num_tokens

    def _pin(self, prefix: SavedPrefix, num_blocks: int, taps: Tensor | None) -> _Pinned:
        blocks = self._blocks.find(prefix.hashed_ids, self._root(prefix))
        if len(blocks) < num_blocks:
            raise RuntimeError(f"{len(blocks)} of {num_blocks} blocks are cached")
        self._blocks.pin(blocks)
        pinned = self._pinned[self._key(prefix)] = _Pinned(prefix, blocks, taps)
        if taps is not None:
            self._engine.contexts.keep(self._blocks.block_hash(blocks[-1]), taps)
        return pinned

    def _unpin(self, key: Key) -> None:
        blocks = self._pinned.pop(key).blocks
        if not any(other.blocks == blocks for other in self._pinned.values()):
            self._engine.contexts.forget(self._blocks.block_hash(blocks[-1]))
        self._blocks.unpin(blocks)

    def _give_up(self, request_id: str, reason: str) -> None:
        self._engine.abort_request(request_id)
        computing, _ = self._end(request_id)
        computing.done.set_result(Refusal(INVALID, reason))

    def _end(self, request_id: str) -> tuple[_Computing, Tensor | None]:
        """Ends the computation of a prefix; returns its entry and the recorded taps."""
        if self._states is not None:
            self._states.marks.pop(request_id, None)
        taps = self._engine.contexts.end_recording(request_id) if self._engine.needs.keeps_context else None
        return self._computing.pop(request_id), taps

    @staticmethod
    def _root(prefix: SavedPrefix) -> bytes:
        return salted_root("", prefix.variant_digest)

    @staticmethod
    def _key(prefix: SavedPrefix) -> Key:
        return prefix.name, prefix.version


def most_pinned_blocks(engine: "Engine", max_pinned_tokens: int | None) -> int:
    """Returns the maximum number of blocks that may be pinned.

    The other blocks always suffice for a sequence of max_model_len, so that every request can finish.

    Raises:
        ValueError: max_pinned_tokens exceeds this maximum.
    """
    config, num_blocks = engine.config, engine.block_manager.num_blocks
    beside = max(0, num_blocks - 1 - config.max_blocks_per_seq)
    if max_pinned_tokens is None:
        return min((num_blocks - 1) // 4, beside)
    wanted = max_pinned_tokens // config.block_size
    if wanted > beside:
        raise ValueError(
            f"max_pinned_tokens is {max_pinned_tokens}: beside a sequence of max_model_len "
            f"{config.max_model_len} there is room for {beside * config.block_size}; lower one of them, or give more KV"
        )
    return wanted
