"""What a drafter is: it learns what was decided, and proposes what may come next."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import DraftHead, HeadConvention
from wingbeat.runtime.protocol.chunk_inputs import ChunkInputs
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree
from wingbeat.runtime.protocol.sampling_rules import RuleKinds, SamplingRules
from wingbeat.runtime.speculation.growth_rule import GrowthRule

logger = logging.getLogger(__name__)


class DrafterNeeds(NamedTuple):
    """What a drafter must be given by the verifier it drafts for; the verifier is built to it."""

    tap_layers: tuple[int, ...] = ()
    """Layers whose *input* is tapped, ascending; the number of layers stands for the output of the final norm."""
    keeps_context: bool = False
    """It keeps state per committed position: chunks and decodes are sent, and what it lacks is replayed. Without taps
    their taps have width 0. Otherwise the token history in the channel is all it reads."""
    kv_layers: tuple[int, ...] = ()
    """Layers, ascending, whose key and value at each position follow the tapped hidden states: each layer's key, flat
    over its heads, then its value."""
    token_bytes: int = 0
    """Of its own KV per position, kept under the verifier's blocks."""
    embedding_width: int = 0
    """Width of the embeddings of prompts' spans that it reads in the place of their tokens' own, where the verifier's
    are as wide; 0 reads the tokens' own."""
    held_bytes: int = 0
    """Of its GPU, where it has a process of its own there: its weights, and whatever else it holds once loaded."""


class NextHead(NamedTuple):
    """Weights that are read and checked, to be taken between two rounds."""

    head: Any
    """On the drafter's device."""
    prepared: Any = None
    """The same as `HeadDrafter.passes` read it; None where torch drafts."""


class DraftBatch(NamedTuple):
    """One pass over every attached verifier: their outcomes side by side, slots and blocks made unique.

    Decode rows and chunks are pairs (taps at position i, token i + 1), as in `protocol.messages.Outcome`.
    The slots of decodes and proposals lie on the host, all other tensors on the drafter's device.
    """

    decode_slots: Tensor
    """int64 [num_decodes], on the host"""
    decode_positions: Tensor
    """int64 [num_decodes]: first position computed."""
    decode_num_tokens: Tensor
    """int64 [num_decodes]: pairs that count, 1..max_path."""
    decode_token_ids: Tensor
    """int64 [num_decodes, max_path]"""
    decode_taps: Tensor
    """[num_decodes, max_path, taps_size]"""
    chunk_slots: list[int]
    chunk_positions: list[int]
    chunk_lens: list[int]
    chunk_next_token_ids: Tensor
    """int64 [num_chunk_tokens], chunks back to back."""
    chunk_taps: Tensor
    """[num_chunk_tokens, taps_size]"""
    proposal_slots: Tensor
    """int64 [num_proposals], on the host: sequences that want a tree."""
    epochs: Tensor
    """int64 [num_slots] by slot, as the next five: changes whenever a slot gets another sequence or loses its state."""
    committed_lens: Tensor
    """int64 [num_slots]"""
    block_tables: Tensor
    """int64 [num_slots, max_blocks_per_seq]"""
    temperatures: Tensor
    """float32 [num_slots]"""
    seeds: Tensor
    """int64 [num_slots]"""
    token_ids: Tensor
    """int64 [num_slots, max_committed_len or more]: token history; committed_lens entries count."""
    max_committed_len: int
    """Longest sequence among decodes, chunks and proposals, or a bound of it: bounds the context to gather."""
    max_levels: int | None = None
    """Most levels to grow this time; None is the configured depth. Kinds whose levels cost nothing grow them all."""
    last_token_ids: Tensor | None = None
    """int64 [num_slots] by slot: the last decided tokens; None where only the history has them."""
    growth_rules: tuple[tuple[slice, GrowthRule], ...] = ()
    """Rows of the proposals by verifier, and the rule that ends their growth; none grows every level."""

    allowed_tokens: Tensor | None = None
    """int32 [num_proposals, ceil(vocab_size / 32)]: tokens that may follow each root, as `Outcome.allowed_tokens`; None
    where all may, or nobody can say it in time."""

    sampling_rules: SamplingRules | None = None
    """By slot, the requests' own rules of sampling; None where nobody that wants a tree has any."""
    rule_kinds: int = RuleKinds.every()
    """`RuleKinds`: what of these rules says anything."""

    position_deltas: Tensor | None = None
    """int64 [num_slots] by slot, as `Outcome.position_deltas`; None where nobody's are moved."""
    chunk_inputs: ChunkInputs | None = None
    """Inputs of the chunks; None where all of them are text behind their sequences' spans, or have none."""

    def chunk_tokens(self, head: DraftHead) -> Tensor:
        """The chunks' tokens int64 [num_chunk_tokens], or their embeddings where some are of spans."""
        if self.chunk_inputs is None or not head.embedding_width:
            return self.chunk_next_token_ids
        return self.chunk_inputs.embedded(head.embed(self.chunk_next_token_ids))

    def chunk_rotations(self, positions: list[Tensor]) -> Tensor:
        """By what the chunks' pairs at these positions, chunk by chunk, are rotated: int64 [num_chunk_tokens], or
        [3, num_chunk_tokens] where they lie in grids."""
        if self.chunk_inputs is None and self.position_deltas is not None:
            slots = zip(self.chunk_slots, positions, strict=True)
            return torch.cat([of_chunk + self.position_deltas[slot] for slot, of_chunk in slots])
        plain = torch.cat(positions)
        return plain if self.chunk_inputs is None else self.chunk_inputs.positions(plain)

    def without_commits(self) -> "DraftBatch":
        """The proposals alone."""
        empty = {name: part[:0] for name, part in self._asdict().items() if name.startswith("decode_")}
        return self.without_chunks()._replace(**empty)

    def without_chunks(self) -> "DraftBatch":
        """The decodes and the proposals."""
        return self._replace(chunk_slots=[], chunk_positions=[], chunk_lens=[], chunk_inputs=None)


@dataclass(frozen=True)
class DrafterOptions:
    """How a drafter's weights are held and run."""

    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    cuda_graphs: bool = True
    """On CUDA, capture the passes of kinds with weights."""
    fp8_weights: bool = False
    """Round the weights of an EAGLE head's products to eight bits."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the kind, `DrafterKind.settings`, that are given."""


class Drafter(ABC):
    """A way of drafting. Knows slots and blocks, not channels or verifiers.

    `draft` is called once per pass. `propose` never commits draft KV; `commit` does. A prompt is
    committed like any accepted token: in chunks.
    """

    device: torch.device = torch.device("cpu")
    """Where it drafts; batches are moved there."""
    needs: DrafterNeeds = DrafterNeeds()
    """Of its verifier; tokens suffice by default."""
    trained_positions: int | None = None
    """Longest context its weights were trained for, in tokens; None where there is no such limit."""

    def read_as(self, convention: HeadConvention) -> None:
        """Read the weights another way, before the first `resize`; for kinds whose checkpoints leave that open.

        Raises:
            ValueError: there is nothing to choose, or these weights cannot be read so.
        """
        raise ValueError(f"{type(self).__name__} has no conventions to choose from")

    def prepare_head(self, source: str) -> NextHead:
        """Read and check another head of the same shape, for `take_head`; in any thread, while this drafter drafts.

        Args:
            source: folder of the head.

        Raises:
            ValueError: it does not fit, has numbers that are none, or this kind has no head; one line that says why.
        """
        raise ValueError(f"{type(self).__name__} drafts with no head that could be swapped: only EAGLE and one-pass do")

    def take_head(self, head: NextHead) -> None:
        """Draft with other weights from now on; only between two rounds. What is kept of contexts stays as it is."""
        raise ValueError(f"{type(self).__name__} drafts with no head that could be swapped: only EAGLE and one-pass do")

    def warn_of_long_context(self, max_model_len: int) -> None:
        """Log what contexts beyond the trained ones cost: EAGLE-3 heads trained on 2k fall from 2.3 to 1.1 at 20k."""
        if self.trained_positions is not None and max_model_len > self.trained_positions:
            logger.warning(
                "max_model_len is %d: the drafter was trained for %d positions, and few drafts beyond them are right",
                max_model_len,
                self.trained_positions,
            )

    def try_threads(self, most: int) -> None:
        """Draft with as many threads as pay on this machine, as it is now; once, after a first `resize`.

        Kinds that have no threads of their own leave it at torch's number.

        Args:
            most: cores that the process may have.
        """
        return

    @abstractmethod
    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Make room for `num_slots` sequences over `num_blocks` KV blocks, keeping what is stored.

        Raises:
            ValueError: the channel's shapes do not fit this drafter.
        """

    @abstractmethod
    def commit(self, batch: DraftBatch) -> None:
        """Take in the decided tokens and their hidden states."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> TokenTree:
        """One tree per proposal slot, each rooted at the sequence's last committed token."""

    @property
    def trees_by_slot(self) -> TokenTree | None:
        """The latest trees by slot, until the next pass, where the drafter keeps them so: a reply is then one copy."""
        return None

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """Draft the round last polled of the only verifier there is straight into its reply, which is not published.

        Returns:
            False where it has done nothing, and `draft` has to.
        """
        return False

    @property
    def stage_counts(self) -> dict[str, int]:
        """As `GraphStats.counts`; empty where nothing is captured."""
        return {}

    on_committed: Callable[[], object] = staticmethod(lambda: None)
    """Called within a pass, between taking in and proposing."""

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """One pass: commit, then a tree per proposal slot; None where there is no proposal."""
        self.commit(batch)
        self.on_committed()
        return self.propose(batch) if batch.proposal_slots.numel() else None
