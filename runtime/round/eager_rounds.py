"""Rounds without CUDA graphs, in unpadded shapes: rounds on CPUs, without decodes, or of a shape that is not
captured."""

import time
from concurrent.futures import Future
from dataclasses import dataclass

from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.buffers import ForwardResult
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.choice import PathAcceptance, TokenChooser
from wingbeat.runtime.round.rows import Model, Pruner
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


@dataclass
class EagerRounds:
    """Runs the operations of a round one by one.

    `DecodeGraphs` has the same methods `forward`, `with_roots` and `decide`.
    """

    model: Model
    builder: BatchBuilder
    slots: SlotState
    chooser: TokenChooser
    acceptance: PathAcceptance
    pruner: Pruner | None
    """Prunes trees on the device; None if the device does not prune trees."""

    def forward(
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: TokenTree | None,
        num_nodes: int,
        masks: "Future[list[int]] | None" = None,
    ) -> ForwardResult:
        """Runs the model over a round's decodes and prompt chunks.

        Args:
            trees: one tree per decode; None for bare roots.
            num_nodes: number of nodes of each tree to verify, if trees are pruned on the device.
            masks: future from `TokenMasks.started`; this method waits until the future is done.
        """
        evidence = None
        if self.pruner is not None:
            # Masks have a row for each node before pruning.
            trees, masks = rooted(trees, masks), None
            if trees is not None:
                trees, evidence = self.pruner.prune(trees, rows.slots, num_nodes)
        decodes = self.builder.decodes(rows.slots, trees) if plan.decodes else None
        batch = self.builder.flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch)
        forward_s = time.perf_counter() - started
        own, chunks = output.split(0 if decodes is None else decodes.num_rows)
        if chunks.taps is not None and batch.chunk_rows is not None:
            chunks = chunks._replace(taps=output.taps.index_select(0, batch.chunk_rows))
        tree = rooted(None if decodes is None else decodes.tree, masks)
        if decodes is not None:
            decodes.tree = tree
        return ForwardResult(decodes, own, evidence, chunks if plan.chunks else None, forward_s)

    def with_roots(self, result: ForwardResult, late: list[int]) -> ForwardResult:
        """Returns the result, in which the trees of the decodes in `late` are reduced to their roots."""
        if late:
            result.decodes.tree = only_roots(result.decodes.tree, late)
        return result

    def decide(self, plan: SchedulerOutput, result: ForwardResult) -> AcceptedPaths:
        """Chooses tokens, walks the trees, and advances KV cache and slot state along the accepted paths."""
        decodes, (logits, taps) = result.decodes, result.output
        chosen = self.chooser.choose(plan.decodes, decodes, logits)
        accepted = self.acceptance.accept(decodes, chosen, taps, result.evidence)._replace(packed=None)
        if decodes is not None:
            self.builder.took(accepted)
        if any(seq.request.params.has_penalties for seq in plan.decodes):
            self.slots.processors.count(accepted.slots, accepted.token_ids, accepted.num_tokens)
        if plan.asking:
            accepted = accepted._replace(logprobs=self.chooser.path_logprobs(decodes, accepted, logits, plan.asking))
        return accepted


def rooted(trees: TokenTree | None, masks: "Future[list[int]] | None") -> TokenTree | None:
    """Waits for the masks; returns the trees. Trees whose masks came too late are reduced to their roots."""
    late = [] if masks is None else masks.result()
    return trees if trees is None or not late else only_roots(trees, late)


def only_roots(trees: TokenTree, rows: list[int]) -> TokenTree:
    """Returns the trees; the trees in `rows` are reduced to their roots."""
    num_valid = trees.num_valid.clone()
    num_valid[upload(rows, num_valid.device)] = 1
    return trees._replace(num_valid=num_valid)
