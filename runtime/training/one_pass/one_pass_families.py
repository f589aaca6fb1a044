"""Trainable families that draft a block in one pass: DFlash and its derivatives, and P-EAGLE."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.blocks import block_matches
from wingbeat.runtime.one_pass.config import LayerMask, MarkovConfig, MarkovKind, OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import load_parallel_head
from wingbeat.runtime.one_pass.save import save_one_pass_head, save_parallel_head
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.family import Family, TrainedHead
from wingbeat.runtime.training.head_init import head_shapes
from wingbeat.runtime.training.loop import Inputs
from wingbeat.runtime.training.one_pass.block_losses import BlockLoss, LatticeLoss, MarkovLoss, ParallelLoss
from wingbeat.runtime.training.one_pass.one_pass_init import (
    for_training,
    initial_one_pass_head,
    initial_parallel_head,
    lattice_shape,
    mask_token,
)
from wingbeat.runtime.training.parallel import Part
from wingbeat.runtime.training.verifier_weights import VerifierWeights


def draw_anchors(seed: int, step: int, rows: range, learnt: Tensor, num_drafted: int, num_anchors: int) -> Tensor:
    """Draws start positions of blocks, ascending -> int64 [len(rows), min(num_anchors, number of candidates)].

    Each row of a batch has its own random stream, so that a row gets the same positions whether the batch is split into
    parts or not. A position whose next token is not to be learnt is drawn only if there are too few other positions.

    Args:
        seed, step: select the random streams.
        rows: indices of the sequences in the step's batch.
        learnt: bool [len(rows), length]: whether the prediction of a token is to be learnt.
        num_drafted: number of tokens that must follow a block's start.
        num_anchors: maximum number of positions per row.
    """
    drawn = []
    count = learnt.shape[1] - 1 - num_drafted
    for row, wanted in zip(rows, learnt[:, 2 : 2 + count].numpy(), strict=True):
        order = np.random.default_rng((seed, step, row)).permutation(count)
        chosen = order[np.argsort(~wanted[order], kind="stable")][:num_anchors]
        drawn.append(1 + np.sort(chosen))
    return torch.from_numpy(np.stack(drawn))


class BlockFamily(Family):
    """A head that drafts a block; training blocks start at randomly drawn tokens."""

    kind: OnePassFamily

    def shapes(self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights) -> dict[str, Any]:
        """Config fields of the head: the verifier's shapes, except where the user's settings give others."""
        shapes = head_shapes(weights, self.tap_layers(config, target), config.intermediate_size)
        shapes["num_key_value_heads"] = config.num_key_value_heads or shapes["num_attention_heads"]
        return shapes | {"draft_vocab_size": min(config.draft_vocab_size, weights.vocab_size)}

    @abstractmethod
    def num_drafted(self, config: TrainDrafterConfig) -> int:
        """Number of tokens that a block drafts."""

    def inputs(self, config: TrainDrafterConfig, found: Inputs, step: int, part: Part) -> Inputs:
        """See `Family.inputs`; adds the start positions of the blocks."""
        token_ids, taps, target, *masks = found.tensors
        loss_mask = masks[0] if masks else None
        learnt = torch.ones_like(token_ids, dtype=torch.bool) if loss_mask is None else loss_mask
        rows = part.rows(config.batch_size)
        anchors = draw_anchors(config.seed, step, rows, learnt.cpu(), self.num_drafted(config), config.num_anchors)
        tensors = (token_ids, taps, target, loss_mask, anchors.to(token_ids.device))
        return found._replace(tensors=tensors)

    def matches(self, head: TrainedHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
        """See `Family.matches`."""
        return block_matches(head, token_ids, taps, num_steps)

    def chain(self, config: TrainDrafterConfig) -> int:
        """See `Family.chain`; at most the block's number of tokens."""
        return min(super().chain(config), self.num_drafted(config))

    def continued(
        self, config: TrainDrafterConfig, target: TargetDescription, shape: OnePassConfig | EagleHeadConfig
    ) -> TrainedHead:
        """The head of `config.initial_head`; raises ValueError unless it has this family and shape."""
        name = f"initial_head={str(config.initial_head)!r}"
        if read_one_pass_checkpoint(config.initial_head).family is not self.kind:
            raise ValueError(f"{name} is not of family={config.family!r}")
        head = self.load(config.initial_head, target)
        different = [field for field in vars(shape) if getattr(shape, field) != getattr(head.config, field)]
        if different:
            raise ValueError(f"{name} has another {', '.join(different)}")
        return self.free(head)


class DFlashFamily(BlockFamily):
    """The DFlash head, whose slots are independent."""

    kind = OnePassFamily.DFLASH
    slots = Slots.FILL_IN

    def num_drafted(self, config: TrainDrafterConfig) -> int:
        """See `BlockFamily.num_drafted`."""
        return config.block_size - (1 if self.slots is Slots.FILL_IN else 0)

    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """See `Family.new_head`."""
        shape = self._shape(config, target, weights, token_weights)
        if config.initial_head is not None:
            return self.continued(config, target, shape)
        return initial_one_pass_head(weights, shape, token_weights, config.seed)

    def load(self, folder: Path, target: TargetDescription) -> TrainedHead:
        """See `Family.load`."""
        return load_one_pass_head(read_one_pass_checkpoint(folder), target, torch.float32, "cpu")

    def free(self, head: TrainedHead) -> TrainedHead:
        """See `Family.free`."""
        return for_training(head)

    def settings_of(self, head: TrainedHead) -> dict[str, Any]:
        """See `Family.settings_of`."""
        markov = head.config.markov
        own = {} if markov is None else {"confidence_weight": float(markov.has_confidence)}
        return {"block_size": head.config.block_size} | own

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return BlockLoss(head, config.step_decay)

    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """See `Family.export`."""
        save_one_pass_head(head, path, target_num_layers=TargetDescription.from_checkpoint(verifier).num_layers)

    def _shape(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> OnePassConfig:
        causal = self.kind is OnePassFamily.JETSPEC
        return OnePassConfig(
            **self.shapes(config, target, weights),
            family=self.kind,
            slots=self.slots,
            block_size=config.block_size,
            masks=(LayerMask(causal),) * config.num_layers,
            mask_token_id=mask_token(token_weights),
            **self._own_shape(config, weights),
        )

    def _own_shape(self, config: TrainDrafterConfig, weights: VerifierWeights) -> dict[str, Any]:
        """Fields of `OnePassConfig` that this family sets in addition to DFlash's."""
        return {}


class JetSpecFamily(DFlashFamily):
    """JetSpec: the layers of DFlash, with slots that see only slots to their left."""

    kind = OnePassFamily.JETSPEC


class DSparkFamily(DFlashFamily):
    """DSpark: the layers of DFlash, with logits corrected by the previous token, and a confidence head."""

    kind = OnePassFamily.DSPARK
    slots = Slots.SHIFT

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return MarkovLoss(head, config.step_decay, config.confidence_weight)

    def _own_shape(self, config: TrainDrafterConfig, weights: VerifierWeights) -> dict[str, Any]:
        reads_token = config.pair_rank > 0
        kind = MarkovKind(config.markov_kind)
        return {"markov": MarkovConfig(config.pair_rank, kind, config.confidence_weight > 0, reads_token)}


class DFlash2Family(DFlashFamily):
    """DFlash2: the layers of DFlash with convolutions over the slots, and scores of pairs of candidates."""

    kind = OnePassFamily.DFLASH2

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return LatticeLoss(head, config.step_decay)

    def _own_shape(self, config: TrainDrafterConfig, weights: VerifierWeights) -> dict[str, Any]:
        draft_vocab_size = min(config.draft_vocab_size, weights.vocab_size)
        return {"lattice": lattice_shape(weights.config.hidden_size, draft_vocab_size, config.pair_rank)}


class ParallelEagleFamily(BlockFamily):
    """P-EAGLE: EAGLE-3's pairs, followed by masked slots."""

    kind = OnePassFamily.PEAGLE

    def num_drafted(self, config: TrainDrafterConfig) -> int:
        """See `BlockFamily.num_drafted`."""
        return config.block_size

    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """See `Family.new_head`."""
        shape = EagleHeadConfig(**self.shapes(config, target, weights), num_layers=config.num_layers)
        if config.initial_head is not None:
            return self.continued(config, target, shape)
        return initial_parallel_head(
            weights,
            shape,
            token_weights,
            mask_token_id=mask_token(token_weights),
            seed=config.seed,
        )

    def load(self, folder: Path, target: TargetDescription) -> TrainedHead:
        """See `Family.load`."""
        return load_parallel_head(read_one_pass_checkpoint(folder), target, torch.float32, "cpu")

    def free(self, head: TrainedHead) -> TrainedHead:
        """See `Family.free`."""
        head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
        return head.train()

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return ParallelLoss(head, config.block_size, config.step_decay)

    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """See `Family.export`."""
        save_parallel_head(head, path, verifier=config.verifier)
