"""MTP modules as a trainable family."""

from pathlib import Path

from torch import Tensor, nn

from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.mtp.mtp_loader import num_mtp_modules
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.losses import DraftLoss
from wingbeat.runtime.training.mtp.mtp_head import MtpHead, save_mtp_module
from wingbeat.runtime.training.unrolled_families import UnrolledFamily
from wingbeat.runtime.training.verifier_weights import VerifierWeights


class MtpFamily(UnrolledFamily):
    """A multi-token-prediction (MTP) module of the verifier's own layer class."""

    inside_verifier = True

    def tap_layers(self, config: TrainDrafterConfig, target: TargetDescription) -> tuple[int, ...]:
        """See `Family.tap_layers`.

        Raises:
            ValueError: the verifier already has MTP modules.
        """
        if num_mtp_modules(target):
            raise ValueError(f"verifier={config.verifier!r} has MTP modules already: serve it with the drafter mtp")
        return (target.num_layers,)

    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """See `Family.new_head`."""
        return MtpHead(weights, config.seed)

    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """See `Family.loss`. The loss skips no chains, because the verifier's layer runs over whole sequences."""
        return DraftLoss(head, config.ttt_steps, config.step_decay, ends_chains=False)

    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """See `Family.export`."""
        save_mtp_module(head, verifier, path)
