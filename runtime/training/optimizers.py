"""Which optimizer trains which parameter."""

import torch
from torch import nn

_WEIGHT_DECAY = 0.05
"""Of the matrices that Muon trains."""
_NO_LAYERS = ("embed", "lm_head", "markov_w", "confidence", "codebook", "key_norms")
"""Parts of the names of tables by token, of what makes probabilities, and of norms side by side."""


def build_optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, the output head, biases and norms.

    Muon's steps are scaled to the RMS of AdamW's, so that one learning rate serves both.
    Source: K. Jordan, "Muon: an optimizer for hidden layers" (2024); the scale is from Moonlight (arXiv 2502.16982).
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_matrix = {name: p.ndim == 2 and not any(part in name for part in _NO_LAYERS) for name, p in trained.items()}
    matrices = [p for name, p in trained.items() if is_matrix[name]]
    others = [p for name, p in trained.items() if not is_matrix[name]]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    return optimizers
