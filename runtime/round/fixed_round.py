"""The functions that CUDA graphs capture: a round whose tensor shapes depend on the arguments' shapes alone."""

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.round.buffers import ForwardResult
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.choice import Choosing, PathAcceptance, TokenChooser
from wingbeat.runtime.round.prompt_chunks import ChunkRows
from wingbeat.runtime.round.rows import Model, ModelOutput, Pruner
from wingbeat.runtime.round.slots import SlotState


class FixedRound:
    """Forward pass and choice of tokens at fixed shapes.

    Rows of the spare slot are padding: they read and write block 0 and change no sequence.

    Args:
        pruner: prunes trees on the device; None if the device does not prune trees.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        slots: SlotState,
        chooser: TokenChooser,
        acceptance: PathAcceptance,
        pruner: Pruner | None,
    ) -> None:
        self.model, self.builder, self.slots = model, builder, slots
        self.chooser, self.acceptance, self.pruner = chooser, acceptance, pruner

    def forward(
        self,
        slots: Tensor,
        trees: TokenTree | None,
        num_nodes: int,
        chunks: ChunkRows | None = None,
        into: ModelOutput | None = None,
        lean: bool = False,
    ) -> ForwardResult:
        """Runs the model over decodes, followed by prompt chunks in pieces.

        Args:
            slots: int64 [num_reqs].
            trees: draft trees, which this method may overwrite; None for bare roots.
            num_nodes: number of nodes of each tree to verify.
            chunks, lean: as for `BatchBuilder.fixed`.
            into: memory in which the model may place its output.
        """
        evidence = None
        if trees is not None and self.pruner is not None:
            trees, evidence = self.pruner.prune(trees, slots, num_nodes)
        decodes = self.builder.decodes(slots, trees)
        rows = self.builder.fixed(decodes, chunks, lean)._replace(into=into)
        own, behind = self.model(rows).split(decodes.num_rows)
        return ForwardResult(decodes, own, evidence, None if chunks is None else behind)

    def decide(self, result: ForwardResult, choosing: Choosing) -> AcceptedPaths:
        """Chooses the tokens of a forward pass and applies the accepted paths.

        Args:
            choosing: a kind of choice that serves the parameters of all sequences in the pass.
        """
        decodes, logits, evidence = result.decodes, result.output.logits, result.evidence
        slots = decodes.slots
        nodes = None if evidence is None else self.pruner.verified_nodes(evidence, decodes.token_ids.shape[1])
        chosen = self.chooser.choose_fixed(decodes, logits, choosing, nodes)
        accepted = self.acceptance.accept(decodes, chosen, result.output.taps, evidence)
        self.builder.took(accepted)
        if choosing is not Choosing.ALTERED:
            return accepted
        self.slots.processors.count(slots, accepted.token_ids, accepted.num_tokens)
        logprobs = self.chooser.path_logprobs(decodes, accepted, logits, None)
        told = torch.cat([accepted.packed, logprobs.flatten(1)], dim=1)
        return accepted._replace(logprobs=logprobs, packed=told)
