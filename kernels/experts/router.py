"""Choice of experts for each row: torch reference; GPUs use `kernels.experts.triton`, one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels import choice


class Rule(NamedTuple):
    """Rule by which a router's logits become chosen experts and their weights."""

    top_k: int
    """Number of experts per row."""
    sigmoid: bool = False
    """Whether scores are sigmoids of the logits, instead of their softmax."""
    normalised: bool = True
    """Whether a row's weights are divided by their sum."""
    least: float = 0.0
    """Term that is added to the sum by which weights are divided."""
    scale: float = 1.0
    """Factor of the weights."""
    dtype: torch.dtype = torch.float32
    """Dtype of the weights."""
    num_shared: int = 0
    """Number of further choices that all rows have, whose ids follow those of the experts."""
    num_groups: int = 1
    """Number of groups of as many experts each."""
    kept_groups: int = 1
    """Number of a row's best groups, from which its experts are chosen."""
    group_best: int = 1
    """Number of a group's best scores, 1 or 2, whose sum ranks the group."""


def choose(
    logits: Tensor, bias: Tensor | None, rule: Rule, shared_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses each row's experts, the best first; among equal experts or groups, the first.

    Args:
        logits: [num_rows, num_experts], contiguous.
        bias: [num_experts], added to the scores for the choice alone; None adds nothing.
        shared_logits: [num_rows, 1], contiguous: the sigmoids weight the shared choices; None weights them by 1.

    Returns:
        Weights [num_rows, top_k + num_shared] in the rule's dtype; and experts, int64 of the same shape.
    """
    if kernels := choice.compiled("grouped_product", logits):
        return kernels.choose(logits, bias, rule, shared_logits)
    wide = logits.float()
    scores = wide.sigmoid() if rule.sigmoid else wide.softmax(dim=-1)
    is_limited = rule.kept_groups < rule.num_groups
    ranks = wide if bias is None and not is_limited else scores if bias is None else scores + bias
    if is_limited:
        groups = ranks.unflatten(1, (rule.num_groups, -1))
        sums = groups.topk(rule.group_best, dim=-1).values.sum(dim=-1)
        dropped = sums.sort(dim=-1, descending=True, stable=True).indices[:, rule.kept_groups :]
        ranks = groups.scatter(1, dropped[..., None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, chosen)
    if rule.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.least)
    weights, shared = weights * rule.scale, torch.arange(rule.num_shared, device=logits.device) + logits.shape[1]
    of_shared = weights.new_ones(len(logits), 1) if shared_logits is None else shared_logits.float().sigmoid()
    weights = torch.cat([weights, of_shared.expand(-1, rule.num_shared)], dim=1)
    return weights.to(rule.dtype), torch.cat([chosen, shared.expand(len(logits), -1)], dim=1)
