"""Trainable families that draft one token per pass and are unrolled over their own predictions, including EAGLE."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.unroll import matches
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.family import Family, TrainedHead
from wingbeat.runtime.training.head_init import initial_eagle1_head, initial_eagle3_head
from wingbeat.runtime.training.losses import DraftLoss
from wingbeat.runtime.training.verifier_weights import VerifierWeights


class UnrolledFamily(Family):
    """A head whose chains are unrolled in training in the same way as in drafting."""

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return DraftLoss(head, config.ttt_steps, config.step_decay)

    def matches(self, head: TrainedHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
        """See `Family.matches`."""
        return matches(head, token_ids, taps.to(head.dtype), num_steps)


class EagleFamily(UnrolledFamily):
    """EAGLE heads; whether a head is EAGLE-1 or EAGLE-3 is read from the head's files."""

    trains_output = True
    """Whether the output matrix belongs to the head and is trained."""

    def load(self, folder: Path, target: TargetDescription) -> TrainedHead:
        """See `Family.load`."""
        # Without a lender the head gets its own copies of the target's weights. Training must not change weights that a
        # running verifier uses.
        return load_eagle_head(folder, replace(target, lender=None))

    def free(self, head: TrainedHead) -> TrainedHead:
        """See `Family.free`."""
        head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
        head.lm_head.weight.requires_grad_(self.trains_output)
        return head.train()

    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """See `Family.export`."""
        save_eagle_head(head, path, layout=config.layout, with_embedding=False, verifier=config.verifier)

    def _continued(self, config: TrainDrafterConfig, target: TargetDescription) -> TrainedHead:
        head, taps = self.load(config.initial_head, target), self.tap_layers(config, target)
        if isinstance(head, Eagle1Head) == self.trains_output:
            raise ValueError(f"initial_head={str(config.initial_head)!r} is not of family={config.family!r}")
        if head.tap_layers != taps:
            raise ValueError(f"initial_head={str(config.initial_head)!r} reads taps {head.tap_layers}, not {taps}")
        return self.free(head)


class Eagle3Family(EagleFamily):
    """EAGLE-3 and EAGLE-3.1.

    Args:
        newer: whether the head is EAGLE-3.1, with normalised taps and normalised feedback.
    """

    def __init__(self, newer: bool = False) -> None:
        self.newer = newer

    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """See `Family.new_head`."""
        if config.initial_head is not None:
            return self._continued(config, target)
        return initial_eagle3_head(
            weights,
            self.tap_layers(config, target),
            token_weights,
            draft_vocab_size=config.draft_vocab_size,
            intermediate_size=config.intermediate_size,
            seed=config.seed,
            fc_norm=self.newer,
            norm_output=self.newer,
        )


class Eagle1Family(EagleFamily):
    """EAGLE-1, which is also trained to predict the verifier's last hidden states."""

    trains_output = False

    def tap_layers(self, config: TrainDrafterConfig, target: TargetDescription) -> tuple[int, ...]:
        """See `Family.tap_layers`."""
        return (target.num_layers,)

    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """See `Family.new_head`."""
        if config.initial_head is not None:
            return self._continued(config, target)
        return initial_eagle1_head(weights, intermediate_size=config.intermediate_size, seed=config.seed)

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`."""
        return DraftLoss(head, config.ttt_steps, config.step_decay, config.feature_weight)
