"""A round's decodes and prompt chunks at shapes that the arguments' shapes decide: what graphs capture."""

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.round.buffers import ForwardResult
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.choice import Choosing, PathAcceptance, TokenChooser
from wingbeat.runtime.round.prompt_chunks import ChunkRows
from wingbeat.runtime.round.pruning import DevicePruner, verified_nodes
from wingbeat.runtime.round.rows import Model, ModelOutput
from wingbeat.runtime.round.slots import SlotState


class FixedRound:
    """The two parts of such a round. Rows of the spare slot compute in block 0 and change nothing.

    Args:
        pruner: where trees are pruned on the device.
        max_path: tokens that a round emits at most.
        max_model_len: of a sequence.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        slots: SlotState,
        chooser: TokenChooser,
        acceptance: PathAcceptance,
        pruner: DevicePruner | None,
        *,
        max_path: int,
        max_model_len: int,
    ) -> None:
        self.model, self.builder, self.slots = model, builder, slots
        self.chooser, self.acceptance, self.pruner = chooser, acceptance, pruner
        self._ahead = torch.arange(1, max_path + 1, device=slots.device)
        self._last_column = max_model_len

    def forward(
        self,
        slots: Tensor,
        trees: TokenTree | None,
        num_nodes: int,
        chunks: ChunkRows | None = None,
    ) -> ForwardResult:
        """What the model says of decodes, and of prompt chunks in pieces behind them.

        Args:
            slots: int64 [num_reqs].
            trees: the function's own to write into; None for bare roots.
            num_nodes: of each tree, those to verify.
            chunks: as for `BatchBuilder.fixed`.
        """
        evidence = None
        if trees is not None and self.pruner is not None:
            trees, evidence = self.pruner.prune(trees, slots, num_nodes)
        decodes = self.builder.decodes(slots, trees)
        own, behind = self.model(self.builder.fixed(decodes, chunks)).split(decodes.num_rows)
        return ForwardResult(decodes, own, evidence, None if chunks is None else behind)

    def prompts(self, chunks: ChunkRows) -> ModelOutput:
        """What the model says of prompt chunks in pieces, and nothing else."""
        return self.model(self.builder.fixed(None, chunks))

    def decide(self, result: ForwardResult, choosing: Choosing) -> AcceptedPaths:
        """What such a forward pass leads to.

        Args:
            choosing: what the parameters of the sequences ask for, at most.
        """
        decodes, logits, evidence = result.decodes, result.output.logits, result.evidence
        slots = decodes.slots
        nodes = None if evidence is None else verified_nodes(evidence, decodes.token_ids.shape[1])
        chosen = self.chooser.choose_fixed(decodes, logits, choosing, nodes)
        accepted = self.acceptance.accept(decodes, chosen, result.output.taps)._replace(evidence=evidence)
        self.builder.took(accepted)
        if choosing is Choosing.ALTERED:
            self.slots.processors.count(slots, accepted.token_ids, accepted.num_tokens)
            accepted = accepted._replace(logprobs=self.chooser.path_logprobs(decodes, accepted, logits, None))
        # Here it is part of a graph: beside it, each of these would be a launch of its own.
        columns = (accepted.positions[:, None] + self._ahead).clamp_max_(self._last_column)
        told = torch.cat([part.view(len(slots), -1) for part in accepted.told().values()], dim=1)
        return accepted._replace(columns=columns, packed=told)
