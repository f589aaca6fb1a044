"""`Drafter`, the interface of every kind of drafter: stores the state of committed tokens and proposes draft trees."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import DraftHead, HeadConvention
from wingbeat.runtime.protocol.chunk_inputs import ChunkInputs
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree
from wingbeat.runtime.protocol.sampling_rules import RuleKinds, SamplingRules

logger = logging.getLogger(__name__)


class DrafterNeeds(NamedTuple):
    """A drafter's requirements on its verifier; the verifier and the channel are built accordingly."""

    tap_layers: tuple[int, ...] = ()
    """Layers whose *input* hidden states are tapped, ascending. The index num_layers stands for the output of the final
    norm."""
    keeps_context: bool = False
    """Whether the drafter keeps state for each committed position. If True, the verifier sends prompt chunks and
    decodes, and replays positions that the drafter lacks; the taps sent have width 0 if `tap_layers` is empty. If
    False, the drafter reads only the token history in the channel."""
    kv_layers: tuple[int, ...] = ()
    """Layers, ascending, whose keys and values are tapped. In the taps of each position, these keys and values follow
    the hidden states: for each layer the key, flattened over heads, then the value.
    """
    token_bytes: int = 0
    """Bytes per position of the drafter's own KV cache, which uses the verifier's block ids."""
    embedding_width: int = 0
    """Width of the media embeddings that the drafter reads instead of token embeddings at positions of prompt spans;
    used only if the verifier's embeddings have this width. With width 0, the drafter embeds the token ids."""
    held_bytes: int = 0
    """Bytes of GPU memory that the loaded drafter holds (weights and all else), if the drafter runs on the GPU in its
    own process."""
    in_engine: bool = False
    """Whether the drafter runs on the GPU in the engine's process."""


class GrowthRule(Protocol):
    """Decides, after each level of a verifier's trees, whether to grow another level."""

    def pays(self, log_probs: np.ndarray, chosen: np.ndarray) -> bool:
        """Whether another level is worth its cost; called at every depth, from 1 on.

        Args:
            log_probs: [num_reqs, frontier, top_k]: candidates' log-probabilities, conditional on their parents.
            chosen: int64 [num_reqs, kept]: candidates of each request that are expanded next.
        """
        ...


class DraftBatch(NamedTuple):
    """Input of one drafting pass over all attached verifiers.

    The verifiers' outcomes are concatenated, and slots and block ids are offset per verifier.
    Rows of decodes and chunks are pairs (taps at position i, token i + 1), as in `protocol.messages.Outcome`. The slots
    of decodes and proposals are in host memory, all other tensors on the drafter's device.
    """

    decode_slots: Tensor
    """int64 [num_decodes], in host memory"""
    decode_positions: Tensor
    """int64 [num_decodes]: first position computed."""
    decode_num_tokens: Tensor
    """int64 [num_decodes]: number of valid pairs in each row, 1..max_path."""
    decode_token_ids: Tensor
    """int64 [num_decodes, max_path]"""
    decode_taps: Tensor
    """[num_decodes, max_path, taps_size]"""
    chunk_slots: list[int]
    chunk_positions: list[int]
    chunk_lens: list[int]
    chunk_next_token_ids: Tensor
    """int64 [num_chunk_tokens]: token after each position of the chunks, which are concatenated."""
    chunk_taps: Tensor
    """[num_chunk_tokens, taps_size]"""
    proposal_slots: Tensor
    """int64 [num_proposals], in host memory: slots of the sequences that request a tree."""
    epochs: Tensor
    """int64 [num_slots]: epoch of each slot, which changes whenever the slot gets another sequence or loses its state.
    The next five fields are also indexed by slot."""
    committed_lens: Tensor
    """int64 [num_slots]"""
    block_tables: Tensor
    """int64 [num_slots, max_blocks_per_seq]"""
    temperatures: Tensor
    """float32 [num_slots]"""
    seeds: Tensor
    """int64 [num_slots]"""
    token_ids: Tensor
    """int64 [num_slots, max_committed_len or more]: token history; the first committed_lens entries of a row are valid.
    """
    max_committed_len: int
    """Length of the longest sequence among decodes, chunks and proposals, or an upper bound; limits the context that is
    gathered."""
    max_levels: int | None = None
    """Maximum number of levels to grow in this pass; None means the configured depth. Drafters for which further levels
    cost no time ignore this limit and grow all levels.
    """
    last_token_ids: Tensor | None = None
    """int64 [num_slots] by slot: last committed token of each sequence; None if only `token_ids` holds these tokens."""
    growth_rules: tuple[tuple[slice, GrowthRule], ...] = ()
    """Each verifier's range of proposal rows, and the rule that stops growth early for these rows. If empty, every
    level is grown."""

    allowed_tokens: Tensor | None = None
    """int32 [num_proposals, ceil(vocab_size / 32)]: bit mask of the tokens allowed after each root, as in
    `Outcome.allowed_tokens`; None if no token is masked, or if the masks were not ready in time."""

    sampling_rules: SamplingRules | None = None
    """Sampling rules by slot; None if no sequence that requests a tree has sampling rules."""
    rule_kinds: int = RuleKinds.every()
    """`RuleKinds` flags: the kinds of rules that occur in `sampling_rules`."""

    position_deltas: Tensor | None = None
    """int64 [num_slots] by slot: number added to a position to get the RoPE position, as in `Outcome.position_deltas`;
    None if all offsets are 0."""
    chunk_inputs: ChunkInputs | None = None
    """Inputs of the chunks; None if no chunk contains or precedes tokens of media spans."""

    def chunk_tokens(self, head: DraftHead) -> Tensor:
        """Returns the token ids of the chunks, int64 [num_chunk_tokens].

        If some positions are in media spans, returns the chunks' embeddings instead.
        """
        if self.chunk_inputs is None or not head.embedding_width:
            return self.chunk_next_token_ids
        return self.chunk_inputs.embedded(head.embed(self.chunk_next_token_ids))

    def chunk_rotations(self, positions: list[Tensor]) -> Tensor:
        """Returns RoPE positions of the chunks' pairs.

        The result is int64 [num_chunk_tokens], or [3, num_chunk_tokens] for multi-axis RoPE.

        Args:
            positions: int64 position of every pair, one tensor per chunk.
        """
        if self.chunk_inputs is None and self.position_deltas is not None:
            slots = zip(self.chunk_slots, positions, strict=True)
            return torch.cat([of_chunk + self.position_deltas[slot] for slot, of_chunk in slots])
        plain = torch.cat(positions)
        return plain if self.chunk_inputs is None else self.chunk_inputs.positions(plain)

    def without_commits(self) -> "DraftBatch":
        """Returns this batch with its proposals only: no decodes, no chunks."""
        empty = {name: part[:0] for name, part in self._asdict().items() if name.startswith("decode_")}
        return self.without_chunks()._replace(**empty)

    def without_chunks(self) -> "DraftBatch":
        """Returns this batch without its chunks."""
        return self._replace(chunk_slots=[], chunk_positions=[], chunk_lens=[], chunk_inputs=None)


@dataclass(frozen=True)
class DrafterOptions:
    """Data type, device and execution options of a drafter's weights."""

    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    cuda_graphs: bool = True
    """Whether the passes of drafters with weights are captured as CUDA graphs, on CUDA."""
    fp8_weights: bool = False
    """Whether the linear weights of an EAGLE head are quantised to FP8."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the user gave for this kind of drafter, by name; see `DrafterKind.settings`."""


class Drafter(ABC):
    """Base class of all drafters; works on slots and block ids and does not access channels or verifiers.

    `draft` is called once per pass. Only `commit` writes committed draft KV; `propose` never does. Prompts are
    committed in chunks, like accepted tokens.
    """

    device: torch.device = torch.device("cpu")
    """Device on which the drafter runs; batches are moved there."""
    needs: DrafterNeeds = DrafterNeeds()
    """Requirements on the verifier; by default the drafter needs only tokens."""
    stage_s: Mapping[str, float] = MappingProxyType({})
    """Device seconds of stages within captured passes, as in `DraftStages.stage_s`; empty if none is measured.

    Not every pass is measured, so only the ratios of these times are meaningful.
    """
    trained_positions: int | None = None
    """Longest context that the weights were trained for, in tokens; None if there is no such limit."""

    def read_as(self, convention: HeadConvention) -> None:
        """Interpret the weights according to another convention; called before the first `resize`.

        Implemented by kinds of drafters whose checkpoint files leave the convention open.

        Raises:
            ValueError: this kind has a single convention, or the given convention cannot be applied to these weights.
        """
        raise ValueError(f"{type(self).__name__} has no conventions to choose from")

    def warn_of_long_context(self, max_model_len: int) -> None:
        """Log a warning if max_model_len exceeds the trained context length.

        Beyond the trained length the acceptance length falls: for EAGLE-3 heads trained on 2k tokens, from 2.3 to 1.1
        at 20k tokens.
        """
        if self.trained_positions is not None and max_model_len > self.trained_positions:
            logger.warning(
                "max_model_len is %d: the drafter was trained for %d positions; few drafts beyond them are accepted",
                max_model_len,
                self.trained_positions,
            )

    def try_threads(self, most: int) -> None:
        """Measure and set the number of threads with which this drafter drafts fastest on this machine.

        Called once, after the first `resize`. Kinds of drafters without threads of their own do nothing.

        Args:
            most: number of cores that the process may use.
        """
        return

    @abstractmethod
    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Allocate state for `num_slots` sequences over `num_blocks` KV blocks, keeping stored state.

        Raises:
            ValueError: the channel's shapes do not fit this drafter.
        """

    @abstractmethod
    def commit(self, batch: DraftBatch) -> None:
        """Store the state of the newly committed tokens, computed from their hidden states (taps)."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> TokenTree:
        """Return one draft tree per proposal slot, rooted at the sequence's last committed token."""

    @property
    def trees_by_slot(self) -> TokenTree | None:
        """Trees of the latest pass, indexed by slot and valid until the next pass.

        The value is None if the drafter does not store trees by slot.

        With such trees, a reply is written with a single copy.
        """
        return None

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """Draft for the round that was polled last, directly into the reply buffer of the only attached verifier.

        The caller publishes the reply.

        Returns:
            False if this method did nothing and the caller has to call `draft`.
        """
        return False

    @property
    def stage_counts(self) -> dict[str, int]:
        """Replay counts per stage, as in `GraphStats.counts`; empty if nothing is captured."""
        return {}

    on_committed: Callable[[], object] = staticmethod(lambda: None)
    """Function called during each pass, between commit and propose."""

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """Run one pass: commit, then propose one tree per proposal slot. Returns None if there are no proposals."""
        self.commit(batch)
        self.on_committed()
        return self.propose(batch) if batch.proposal_slots.numel() else None
