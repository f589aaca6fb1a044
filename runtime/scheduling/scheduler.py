"""Continuous batching, chunked prefill and preemption: selects the sequences of a round and gives them blocks.

Running sequences decode first; the remaining token budget goes to prompt chunks. When blocks run out, the scheduler
first plans decodes without trees, then preempts sequences: the youngest sequence of the lowest priority first.
`runtime.scheduling.admission_order` selects the sequence that gets a free slot.

A round may be scheduled while the previous round is in flight; the host then has only bounds for the sequences'
lengths. Blocks and slots may nevertheless be reassigned at once. Rounds run in launch order, so a round in flight no
longer uses a block when the block's next owner writes to it. A round in flight writes only after the last cached
position of a sequence.
"""

import logging
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager, IntegrityError
from wingbeat.runtime.scheduling.admission_order import AdmissionOrder
from wingbeat.runtime.scheduling.plan import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, FinishReason, Request, RequestOutput, RequestTooExpensive
from wingbeat.runtime.scheduling.sequence import Sequence, TokenMasker
from wingbeat.runtime.scheduling.suspects import Suspects

logger = logging.getLogger(__name__)


class Seats(Protocol):
    """Limited resource that some requests need in addition to a slot. Several requests may share a seat."""

    def reserve(self, request: Request) -> int | None:
        """Takes a seat and returns its number.

        Returns 0 for a request that needs no seat, None if all seats are taken. Raises if the request can never get a
        seat.
        """
        ...

    def give_back(self, request: Request) -> None:
        """Gives back the request's seat; called only if its number is above 0."""
        ...

    def has_seat(self, request: Request) -> bool:
        """Whether `take` would succeed."""
        ...


class Scheduler:
    """Owner of the waiting and running queues.

    Args:
        eos_token_ids: tokens that end a request, except requests with `ignore_eos`.
        seats: seats that requests need in addition to a slot; None if no request needs any.
        left: function called with each slot that a sequence has left.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        eos_token_ids: frozenset[int],
        seats: Seats | None = None,
        left: Callable[[int], object] = lambda slot: None,
    ) -> None:
        self.config = config
        self._left = left
        self.block_manager = block_manager
        self.eos_token_ids = eos_token_ids
        self._seats = seats
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.failures: list[RequestOutput] = []
        """Last outputs of failed requests; the caller collects and clears them."""
        self.suspects = Suspects()
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._num_epochs = 0
        self._order = AdmissionOrder()

    def add(self, request: Request, masker: TokenMasker | None = None) -> None:
        """Queues a request, whose tokens `masker` may restrict.

        Raises:
            ValueError: the prompt is empty or leaves no position for a token below max_model_len, or the request names
                a variant and the engine has none.
        """
        if request.variant is not None and self._seats is None:
            raise ValueError(f"model {request.variant.name} is a variant: this engine serves none")
        if not request.prompt_token_ids:
            raise ValueError("prompt is empty: give at least one token")
        if (num_tokens := request.num_tokens) >= self.config.max_model_len:
            raise ValueError(
                f"prompt has {num_tokens} tokens: max_model_len {self.config.max_model_len} leaves no room for output"
            )
        seq = Sequence(request, masker)
        seq.metrics.forced_acceptance = self.config.forced_acceptance is not None
        if request.alone:
            self.suspects.add(seq, num_tokens + ALONE_TOKENS)
        self.waiting.append(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """Drops a request, frees its resources and returns its sequence; None if the request has already left."""
        for seq in (*self.running, *self.waiting):
            if seq.request.request_id == request_id:
                self._drop(seq)
                return seq
        return None

    def fail(self, seq: Sequence, error: Exception) -> None:
        """Drops a request whose processing raised; its last output is added to `failures`."""
        request_id = seq.request.request_id
        is_refusal = isinstance(error, RequestTooExpensive)
        if is_refusal:
            logger.warning("Request %s was ended: %s", request_id, str(error))
        else:
            logger.error("Request %s failed", request_id, exc_info=error)
        self.suspects.failed(seq)
        self._drop(seq)
        failure = str(error) if is_refusal else f"request {request_id}: {type(error).__name__}: {error}"
        self.failures.append(RequestOutput(request_id, (), FinishReason.ABORT, failure=failure, is_refusal=is_refusal))

    def isolated(self, seq: Sequence, work: Callable, *args: object) -> object:
        """Runs `work(*args)` for a sequence and returns the result.

        If the call raises, only this sequence is ended, and None is returned.
        """
        try:
            return work(*args)
        except Exception as error:
            self.fail(seq, error)
            return None

    def restart(self, drafted: bool) -> None:
        """Sends all running sequences back to the queue, to be recomputed after a round that raised.

        Each sequence runs alone until it has more tokens than the failed round could have given it.

        Args:
            drafted: whether a drafter was attached. The drafter may have caused the exception; the caller detaches it.

        Raises:
            RuntimeError: no sequence can have caused the exception.
        """
        if not self.running:
            raise RuntimeError("a round raised an exception though no sequence ran in it")
        self.suspects.round_raised(drafted)
        for seq in reversed(self.running):
            self.suspects.add(seq, seq.max_len + self.config.speculation.max_path)
        self.recompute()

    def recompute(self) -> None:
        """Releases all blocks; all running sequences go back to the queue and are recomputed from their tokens."""
        for seq in reversed(self.running):
            self._preempt(seq)
        for seq in self.waiting:
            self._free(seq)

    def add_first(self, request: Request) -> None:
        """Queues a request that runs before all other requests and shares its rounds with no request.

        No sequence may be running.
        """
        seq = Sequence(request)
        self.suspects.add(seq)
        self.waiting.appendleft(seq)

    def schedule(self) -> SchedulerOutput:
        """Selects the work of the next round and allocates its blocks."""
        if self.suspects:
            for seq in [seq for seq in reversed(self.running) if seq not in self.suspects]:
                self._preempt(seq)
        decodes, without_room = self._schedule_decodes()
        budget = self.config.max_num_batched_tokens
        chunks: list[Chunk] = []
        admitted: list[Sequence] = []
        for seq in self.running:
            if seq.wants_chunk and budget:
                chunk = Chunk.next_of(seq, budget)
                chunks += [chunk] if chunk.length else []
                budget -= chunk.length
        while self.waiting and self._free_slots and budget:
            seq = self._next()
            if seq is None or not self.isolated(seq, self._admit, seq):
                break
            chunk = Chunk.next_of(seq, budget)
            if not chunk.length:  # a span that must stay whole waits for a round with more budget
                self._free(seq)
                break
            self._order.remove_admitted(seq, self.waiting)
            self.running.append(seq)
            admitted.append(seq)
            if seq.wants_chunk:
                chunks.append(chunk)
                budget -= chunk.length
            else:
                decodes.append(seq)
        if self._seats is not None:
            decodes.sort(key=attrgetter("seat"))  # rows with the same seat are computed together
        return SchedulerOutput(decodes, chunks, admitted, budget, without_room)

    def advance(self, plan: SchedulerOutput, with_trees: bool) -> None:
        """Records, at the launch of a round, how far prompts are computed and how many tokens may be emitted.

        Args:
            with_trees: False if all decodes verify bare roots, even if trees were requested.
        """
        max_path = self.config.speculation.max_path
        drafted = plan.with_nodes() if with_trees else [False] * len(plan.decodes)
        for seq, with_tree in zip(plan.decodes, drafted, strict=True):
            seq.in_flight.append(max_path if with_tree else 1)
        for chunk in plan.chunks:
            if chunk.replay:
                continue
            chunk.seq.num_computed += chunk.length
            if chunk.samples:
                chunk.seq.in_flight.append(1)

    def update(
        self, decodes: list[tuple[Sequence, list[int]]], chunks: list[tuple[Chunk, list[int]]]
    ) -> list[RequestOutput]:
        """Appends the tokens of the oldest round in flight, caches full blocks and ends finished requests.

        `decodes` and `chunks` must not contain a sequence that lost its slot after the round was launched, even if the
        sequence has been given a slot again.
        """
        if self.suspects.num_unexplained:
            self.suspects.round_went_well()
        outputs = []
        for seq, token_ids in decodes:
            seq.num_computed += len(token_ids)
            outputs.append(self.isolated(seq, self._emit, seq, token_ids))
        for chunk, token_ids in chunks:
            if token_ids:
                outputs.append(self.isolated(chunk.seq, self._emit, chunk.seq, token_ids))
            elif not chunk.replay:
                self.isolated(chunk.seq, self._cache_full_blocks, chunk.seq, chunk.start + chunk.length)
        return [output for output in outputs if output is not None]

    @property
    def num_deferred(self) -> int:
        """Number of waiting sequences that are held back for a reason other than blocks and slots.

        The reason is that a suspect runs alone, or that no seat is free.
        """
        if self.suspects:
            return sum(seq not in self.suspects for seq in self.waiting)
        return 0 if self._seats is None else sum(not self._seats.has_seat(seq.request) for seq in self.waiting)

    def check_integrity(self) -> None:
        """Raises IntegrityError if slots or block reference counts disagree with the running sequences."""
        slots = sorted([*self._free_slots, *(seq.slot for seq in self.running)])
        if slots != list(range(self.config.max_num_seqs)):
            raise IntegrityError(f"slots free or held are {slots}, not 0..{self.config.max_num_seqs - 1} once each")
        self.block_manager.check_integrity([seq.blocks for seq in self.running])

    def _emit(self, seq: Sequence, token_ids: list[int]) -> RequestOutput:
        del seq.in_flight[0]
        kept, reason = seq.append(token_ids, self.eos_token_ids, self.config.max_model_len)
        # Positions of tokens that were cut off after the end of the sequence were computed, but are not counted.
        seq.num_computed = min(seq.num_computed, len(seq.token_ids) - 1)
        self._cache_full_blocks(seq, seq.num_computed)
        logprobs, prompt_logprobs = ((), ()) if seq.reports is None else seq.reports.pop_output(len(kept))
        output = RequestOutput(
            seq.request.request_id, tuple(kept), reason, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        if seq.request.params.report is not None:
            output = output._replace(report=seq.reports.of_prompt(seq.num_prompt_tokens))
        if reason is not None:
            self._drop(seq)
            return output._replace(metrics=seq.metrics, num_cached_tokens=seq.num_cached_tokens)
        if self.suspects and self.suspects.is_past(seq):
            self.suspects.discard(seq)
            if self.suspects:
                self._preempt(seq)
        return output

    def _schedule_decodes(self) -> tuple[list[Sequence], tuple[Sequence, ...]]:
        """Returns the sequences that decode; and, among these, the sequences for whose trees no blocks are free."""
        decodes: list[Sequence] = []
        without_room: list[Sequence] = []
        num_nodes = self.config.speculation.num_nodes
        for seq in list(self.running):
            if seq.slot < 0 or not seq.is_decoding or (seq.in_flight and self._must_settle(seq)):
                continue
            may_draft = seq.may_draft
            if may_draft and self._extend(seq, seq.max_len - 1 + num_nodes):
                decodes.append(seq)
            elif self._grow(seq):
                decodes.append(seq)
                if may_draft:
                    without_room.append(seq)
        return [seq for seq in decodes if seq.slot >= 0], tuple(without_room)

    def _must_settle(self, seq: Sequence) -> bool:
        """Whether the sequence must wait for its rounds in flight.

        A sequence waits in three cases: the rounds in flight certainly end the sequence, these rounds may fill its last
        position, or its grammar may force tokens after these rounds.
        """
        certain = seq.min_len - seq.num_prompt_tokens >= seq.request.params.max_tokens
        return certain or seq.is_awaited or seq.max_len >= self.config.max_model_len

    def _grow(self, seq: Sequence) -> bool:
        """Allocates blocks for the sequence up to its root; returns False if the sequence itself had to be preempted.

        If blocks run out, sequences are preempted, the youngest sequence of the lowest priority first.
        """
        while not self._extend(seq, seq.max_len):
            victim = min(reversed(self.running), key=lambda other: other.request.params.priority)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _extend(self, seq: Sequence, num_positions: int) -> bool:
        missing = -(-num_positions // self.config.block_size) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing > self.block_manager.num_free:
            return False
        seq.blocks.extend(self.block_manager.allocate(missing))
        return True

    def _next(self) -> Sequence | None:
        """Returns the sequence to admit next; None while a suspect has to run alone."""
        if self.suspects:
            return None if self.running else next(seq for seq in self.waiting if seq in self.suspects)
        return self._order.choose(self.waiting)

    def _admit(self, seq: Sequence) -> bool:
        """Gives a waiting sequence a slot and blocks for all its tokens, reusing cached blocks.

        Returns False, having changed nothing, if no seat or too few blocks are free.
        """
        if self._seats is not None:
            seat = self._seats.reserve(seq.request)
            if seat is None:
                return False
            seq.seat = seat
        cached = [] if seq.computes_prompt else self.block_manager.match_prefix(seq.prefix_ids(), seq.root_hash)
        self.block_manager.acquire(cached)
        seq.blocks = list(cached)
        if not self._extend(seq, len(seq.token_ids)):
            self._free(seq)
            return False
        seq.num_computed = len(cached) * self.config.block_size
        if seq.num_output_tokens == 0:
            seq.num_cached_tokens = seq.num_computed
        seq.num_hashed_blocks = len(cached)
        seq.last_hash = self.block_manager.block_hash(cached[-1]) if cached else seq.root_hash
        seq.slot = self._free_slots.pop()
        self._num_epochs += 1
        seq.epoch = self._num_epochs
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and blocks from a running sequence.

        The KV of the sequence's tokens is recomputed once a slot and blocks are free again.
        """
        self.running.remove(seq)
        self._free(seq)
        seq.preempted = True
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _drop(self, seq: Sequence) -> None:
        """Removes a sequence permanently from the queue that holds it, and frees its slot, seat and blocks."""
        for queue in (self.running, self.waiting):
            if seq in queue:
                queue.remove(seq)
        self._free(seq)
        self.suspects.discard(seq)
        # The masker is released now because it may hold much memory, while other objects may still refer to the
        # sequence.
        seq.masker = None

    def _free(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            self._left(seq.slot)
        if seq.seat:
            self._seats.give_back(seq.request)
        self.block_manager.release(seq.blocks)
        seq.reset()

    def _cache_full_blocks(self, seq: Sequence, num_computed: int) -> None:
        size = self.config.block_size
        if (seq.num_hashed_blocks + 1) * size > num_computed:
            return
        ids = seq.prefix_ids()
        while (seq.num_hashed_blocks + 1) * size <= num_computed:
            index = seq.num_hashed_blocks
            tokens = ids[index * size : (index + 1) * size]
            seq.last_hash = self.block_manager.register(seq.blocks[index], seq.last_hash, tokens)
            seq.num_hashed_blocks += 1
