"""Which token the target chooses at each row of a round, and what its log-probability is."""

from enum import StrEnum

import torch
from torch import Tensor

from wingbeat.kernels.sampling.reference import choose_tokens, sampling_workspace
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.request import MAX_LOGPROBS, SamplingParams
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.verifier.batch import Decodes
from wingbeat.runtime.verifier.choices.logprobs import token_logprobs
from wingbeat.runtime.verifier.choices.processors import ProcessorTables, tree_paths
from wingbeat.runtime.verifier.slots import SlotState


class Choosing(StrEnum):
    """What a captured round can do; each does what those before it do."""

    GREEDY = "greedy"
    """Take the best token: every temperature is 0."""
    SAMPLED = "sampled"
    ALTERED = "altered"
    """Process logits first, and report log-probabilities."""

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "Choosing":
        """The least that serves all these."""
        if any(param.alters_logits or param.logprobs is not None for param in params):
            return cls.ALTERED
        return cls.SAMPLED if any(param.temperature > 0 for param in params) else cls.GREEDY


class TokenChooser:
    """Chooses for the sequences of one engine, by the parameters in their slots.

    Args:
        slots: device state by slot.
        workspace_rows: most rows that a captured round chooses for; 0 where nothing is captured.
        max_depth: of a tree's deepest node.
    """

    def __init__(self, slots: SlotState, workspace_rows: int, max_depth: int) -> None:
        self.slots = slots
        self.processors: ProcessorTables = slots.processors
        self.device = slots.device
        self._max_depth = max_depth
        self._workspace_rows = workspace_rows
        self._workspace = sampling_workspace(workspace_rows, slots.vocab_size, self.device) if workspace_rows else None

    def choose(self, plan: SchedulerOutput, decodes: Decodes | None, logits: Tensor) -> Tensor:
        """The tokens of a round's decode rows, then of its sampling chunks: int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size].
        """
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if decodes is None and not sampling:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        params = [seq.request.params for seq in (*plan.decodes, *sampling)]
        altered = any(param.alters_logits for param in params)
        if not altered and not any(param.temperature > 0 for param in params):
            return logits.argmax(dim=-1)
        slots, positions, nodes, paths = [], [], [], []
        if decodes is not None:
            slots.append(decodes.packed(decodes.slots[:, None].expand_as(decodes.positions)))
            positions.append(decodes.packed(decodes.positions) + 1)
        if sampling:
            columns = upload([[seq.slot for seq in sampling], [len(seq.token_ids) for seq in sampling]], self.device)
            slots.append(columns[0])
            positions.append(columns[1])
        rows, at = torch.cat(slots), torch.cat(positions)
        processors = None
        if altered:
            nodes, paths = self._nodes_and_paths(decodes, len(rows))
            processors = self.processors.of_rows(rows, at, nodes, paths, params)
        return self._sample(logits, rows, at, params, processors)

    def choose_fixed(self, decodes: Decodes, logits: Tensor, choosing: Choosing, nodes: Tensor | None) -> Tensor:
        """The tokens of decodes alone, at shapes that the arguments' shapes decide.

        Args:
            nodes: int64 [num_reqs, num_nodes]: which drafted nodes these are, where trees were pruned on the device.
        """
        if choosing is Choosing.GREEDY:
            return logits.argmax(dim=-1)
        rows = decodes.slots[:, None].expand_as(decodes.positions).flatten()
        positions, processors = decodes.positions.flatten() + 1, None
        if choosing is Choosing.ALTERED:
            own, paths = self._nodes_and_paths(decodes, len(rows))
            own = own if nodes is None else nodes.flatten()
            processors = self.processors.of_rows(rows, positions, own, paths, None)
        return self._sample(logits, rows, positions, None, processors)

    def path_logprobs(
        self, decodes: Decodes, accepted: AcceptedPaths, logits: Tensor, rows: list[int] | None
    ) -> Tensor:
        """Of the emitted tokens: int64 [num_decodes, 1..max_path, 1 + 2 * MAX_LOGPROBS], see `token_logprobs`.

        Args:
            logits: [num_rows, vocab_size], as the model left them.
            rows: decodes to look at; None looks at all.
        """
        where, token_ids = decodes.rows_of(accepted.nodes), accepted.token_ids[:, : accepted.nodes.shape[1]]
        if rows is not None:
            chosen = upload(rows, self.device)
            where, token_ids = where[chosen], token_ids[chosen]
        packed = token_logprobs(logits[where.flatten()], token_ids.flatten(), self._num_top)
        return packed.view(*token_ids.shape, -1)

    def chunk_logprobs(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Of the tokens that chunks yielded, or of a prompt's own: int64 [num_rows, 1 + 2 * MAX_LOGPROBS]."""
        return token_logprobs(logits, token_ids, self._num_top)

    @property
    def _num_top(self) -> int:
        return min(MAX_LOGPROBS, self.slots.vocab_size)

    def _nodes_and_paths(self, decodes: Decodes | None, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """By row: its node, and its path below the root; rows of chunks are roots."""
        nodes = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        tree: TokenTree | None = None if decodes is None else decodes.tree
        if tree is None:
            return nodes, None
        index = torch.arange(tree.token_ids.shape[1], device=self.device).expand_as(tree.token_ids)
        num_decode_rows, drafted = decodes.num_rows, tree_paths(tree, self._max_depth)
        nodes[:num_decode_rows] = decodes.packed(index)
        paths = torch.full((num_rows, drafted.shape[-1]), -1, dtype=torch.int64, device=self.device)
        paths[:num_decode_rows] = decodes.packed(drafted)
        return nodes, paths

    def _sample(self, logits, rows, positions, params: list[SamplingParams] | None, processors) -> Tensor:
        """Tokens of sequences in slots `rows` [num_rows], to stand at `positions` [num_rows]."""
        state, any_sampled, any_filtered = self.slots, True, True
        if params is not None:
            sampled = [param for param in params if param.temperature > 0]
            any_sampled = bool(sampled)
            any_filtered = any(param.top_k or param.top_p < 1 or param.min_p for param in sampled)
        return choose_tokens(
            logits,
            state.temperatures[rows],
            state.top_ks[rows],
            state.top_ps[rows],
            state.min_ps[rows],
            state.seeds[rows],
            positions,
            any_sampled=any_sampled,
            any_filtered=any_filtered,
            processors=processors,
            workspace=self._workspace if len(rows) <= self._workspace_rows else None,
        )
