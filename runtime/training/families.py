"""The kinds of heads that can be trained: what each reads, how it starts, and how it is written."""

from pathlib import Path

from torch import Tensor

from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.mtp_loader import num_mtp_modules
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.head_init import initial_eagle1_head, initial_eagle3_head
from wingbeat.runtime.training.mtp_head import MtpHead, save_mtp_module
from wingbeat.runtime.training.verifier_weights import VerifierWeights


def tap_layers(config: TrainDrafterConfig, target: TargetDescription) -> tuple[int, ...]:
    """Layers of the verifier that the head reads; the number of layers stands for the final norm's output.

    Raises:
        ValueError: an MTP module is to be trained for a verifier that has one.
    """
    if config.family == "mtp" and num_mtp_modules(target):
        raise ValueError(f"verifier={config.verifier!r} has MTP modules already: serve it with the drafter mtp")
    if config.family in ("eagle1", "mtp"):
        return (target.num_layers,)
    if config.tap_layers is not None:
        return config.tap_layers
    if config.recordings is not None:
        # The final norm's output is there for other families.
        recorded = RecordingReader(config.recordings).spec.tap_layers
        taps = tuple(layer for layer in recorded if layer < target.num_layers)
        if not taps:
            raise ValueError(f"the recording has taps {recorded}: family={config.family!r} reads the input of layers")
        return taps
    return default_tap_layers(target.num_layers)


def new_head(
    config: TrainDrafterConfig, taps: tuple[int, ...], weights: VerifierWeights, token_counts: Tensor
) -> DraftHead:
    """The head training starts from, its weights that are not the verifier's free to change.

    Args:
        token_counts: int64 [vocab_size], how often each token occurs in the training text.

    Raises:
        ValueError: `config.initial_head` is of another family, or the verifier's layer cannot be an MTP module's.
    """
    if config.family == "mtp":
        return MtpHead(weights, config.seed)
    if config.initial_head is not None:
        return _continued(config, taps, weights)
    if config.family == "eagle1":
        return initial_eagle1_head(weights, intermediate_size=config.intermediate_size, seed=config.seed)
    newer = config.family == "eagle3.1"
    return initial_eagle3_head(
        weights,
        taps,
        token_counts,
        draft_vocab_size=config.draft_vocab_size,
        intermediate_size=config.intermediate_size,
        seed=config.seed,
        fc_norm=newer,
        norm_output=newer,
    )


def _continued(config: TrainDrafterConfig, taps: tuple[int, ...], weights: VerifierWeights) -> DraftHead:
    head = load_eagle_head(
        config.initial_head,
        target_hidden_size=weights.config.hidden_size,
        target_num_layers=weights.config.num_hidden_layers,
        target_vocab_size=weights.vocab_size,
        target_embedding=weights.embedding.float().clone(),
        target_lm_head=weights.lm_head.float().clone(),
    )
    if isinstance(head, Eagle1Head) != (config.family == "eagle1"):
        raise ValueError(f"initial_head={str(config.initial_head)!r} is not of family={config.family!r}")
    if head.tap_layers != taps:
        raise ValueError(f"initial_head={str(config.initial_head)!r} reads taps {head.tap_layers}, not {taps}")
    head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
    head.lm_head.weight.requires_grad_(not isinstance(head, Eagle1Head))
    return head.train()


def feature_weight(config: TrainDrafterConfig) -> float:
    """Of the distance to the verifier's hidden states, which EAGLE-1 predicts."""
    return config.feature_weight if config.family == "eagle1" else 0.0


def export(head: DraftHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
    """Write a head as users load it: a folder of its own, an MTP module inside a copy of the verifier's."""
    if isinstance(head, MtpHead):
        save_mtp_module(head, verifier, path)
    else:
        save_eagle_head(head, path, layout=config.layout, with_embedding=False, verifier=config.verifier)
