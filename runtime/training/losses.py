"""What a head is pulled towards: the verifier's next-token distributions, and in EAGLE-1 its hidden states as well."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.unroll import unroll

_LOGITS_AT_ONCE = {"cpu": 2**20}
"""Logits of a cross-entropy that are read at once, by the kind of device: as a CPU's cache holds them."""
_MOST_LOGITS_AT_ONCE = 2**26
"""Logits on other devices: 256 MiB in float32."""


class DenseTarget(NamedTuple):
    """The verifier's distributions as logits of its whole vocabulary."""

    logits: Tensor
    """[batch, length, vocab_size]; row i is the prediction of token i + 1."""


class TopTarget(NamedTuple):
    """The verifier's distributions as far as a recording keeps them: the likeliest tokens."""

    token_ids: Tensor
    """int64 [batch, length, top_k]; row i predicts token i + 1."""
    probabilities: Tensor
    """float32 [batch, length, top_k], of the whole softmax: what they leave of 1 is unknown."""


class Wanted(NamedTuple):
    """The part of the verifier's distributions that can be drafted, in draft ids."""

    probabilities: Tensor
    """[batch, length, K]"""
    mass: Tensor
    """[batch, length]: their sum."""
    draft_ids: Tensor | None
    """int64 [batch, length, K]: whose they are; None where K counts all draft ids."""

    def rows(self, rows: slice) -> "Wanted":
        """Of some positions of every sequence."""
        return Wanted(*(None if part is None else part[:, rows] for part in self))

    def at(self, rows: Tensor) -> "Wanted":
        """Of positions int64 [batch, N] of each sequence."""
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        return Wanted(*(None if part is None else part[batch, rows] for part in self))

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Of a head's logits [batch, length, draft_vocab_size] -> [batch, length]."""
        mine = logits if self.draft_ids is None else logits.gather(-1, self.draft_ids)
        # -sum(p * log_softmax(x)) with one pass less over the vocabulary.
        return self.mass * logits.logsumexp(-1) - (self.probabilities * mine).sum(-1)

    def totals(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the rows of a head's logits [rows, draft_vocab_size], for a part with one leading size.

        Returns:
            The cross-entropies' sum, and that of the likeliest drafts' probabilities, which has no gradient.
        """
        return _Totals.apply(logits, *self)

    def where(self, chosen: Tensor) -> "Wanted":
        """Of the positions that a mask, bool [batch, length], chooses: the leading sizes become one."""
        return Wanted(*(None if part is None else part[chosen] for part in self))

    def among(self, candidates: Tensor) -> "Wanted":
        """Of some draft ids int64 [batch, length, C] alone; what others have is left out."""
        if self.draft_ids is None:
            probabilities = self.probabilities.gather(-1, candidates)
        else:
            same = candidates[..., None] == self.draft_ids[..., None, :]
            probabilities = (same * self.probabilities[..., None, :]).sum(-1)
        return Wanted(probabilities, probabilities.sum(-1), None)


class _Totals(Function):
    """`Wanted.totals`, with the gradient made while the logits are at hand.

    The scores of a vocabulary are the largest tensor of a step: they are read once, a few rows at a time, which lie in
    a CPU's cache, and their gradient takes their place in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probabilities: Tensor, mass: Tensor, draft_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Two float32 scalars."""
        total, likeliest = torch.zeros((), device=logits.device), torch.zeros((), device=logits.device)
        gradient = torch.empty_like(logits)
        size = max(1, _LOGITS_AT_ONCE.get(logits.device.type, _MOST_LOGITS_AT_ONCE) // logits.shape[-1])
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            scores, wanted = logits[rows].float(), probabilities[rows].float()
            level = scores.logsumexp(-1, keepdim=True)
            mine = scores if draft_ids is None else scores.gather(-1, draft_ids[rows])
            total += (mass[rows] * level[:, 0]).sum() - (wanted * mine).sum()
            likeliest += (wanted * (mine >= scores.amax(-1, keepdim=True))).sum()
            softmax = (scores - level).exp_().mul_(mass[rows][:, None])
            if draft_ids is None:
                softmax -= wanted
            else:
                softmax.scatter_add_(-1, draft_ids[rows], -wanted)
            gradient[rows] = softmax
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(likeliest)
        return total, likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None


class DraftedIds(nn.Module):
    """From a verifier's distributions to what a head can draft of them.

    The verifier's probabilities are not renormalised, neither over the draft vocabulary nor over the tokens a recording
    keeps: a position whose likely tokens cannot be drafted, or are not known, counts for less.

    Args:
        draft_token_ids: int64 [draft_vocab_size], the target id of each draft id.
    """

    token_ids: Tensor
    index: Tensor
    """int64 [vocab_size]: the draft id of each token, -1 where it has none."""

    def __init__(self, draft_token_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        index = torch.full((vocab_size,), -1, device=draft_token_ids.device)
        index[draft_token_ids] = torch.arange(len(draft_token_ids), device=draft_token_ids.device)
        self.register_buffer("token_ids", draft_token_ids, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def forward(self, target: DenseTarget | TopTarget) -> Wanted:
        """The part that can be drafted."""
        if isinstance(target, DenseTarget):
            probabilities = target.logits.float().softmax(-1)[..., self.token_ids]
            return Wanted(probabilities, probabilities.sum(-1), None)
        index = self.index[target.token_ids]
        probabilities = target.probabilities * (index >= 0)
        return Wanted(probabilities, probabilities.sum(-1), index.clamp_min(0))


class DraftLoss(nn.Module):
    """Mean loss of all chains of a batch: `forward` is one unrolled pass.

    Cross-entropy to the verifier's distribution, later steps weighted down.

    Args:
        num_steps: length of the chains.
        step_decay: weight of step j is `step_decay ** j`, divided by the weights' sum.
        feature_weight: of the smooth-L1 distance between the chain's hidden states and the verifier's, which must be
            the taps then (EAGLE-1, arXiv 2401.15077, section 4.1: 10 for 1 of cross-entropy); 0 leaves it out.
        follows_some: chains that have nothing to learn are not run; else the head sees whole batches, as some need.
    """

    def __init__(
        self,
        head: DraftHead,
        num_steps: int,
        step_decay: float,
        feature_weight: float = 0.0,
        follows_some: bool = True,
    ) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.step_decay = step_decay
        self.feature_weight = feature_weight
        self.follows_some = follows_some
        self.accepted: list[Tensor] = []
        """By step of the chains of the last pass, the mean of the verifier's probability of the likeliest draft."""
        self.wanted = DraftedIds(head.draft_token_ids, head.get_submodule("embed_tokens").weight.shape[0])

    def forward(
        self, token_ids: Tensor, taps: Tensor, target: DenseTarget | TopTarget, loss_mask: Tensor | None = None
    ) -> Tensor:
        """The loss of int64 tokens [batch, length] with taps [batch, length, taps_size] -> scalar.

        Args:
            loss_mask: bool [batch, length], False where predicting that token is not to be learnt. Such predictions
                count as loss 0, so that the mean of a batch's parts is the mean of the batch.
        """
        wanted = self.wanted(target)
        width = token_ids.shape[1] - self.num_steps - 1
        if loss_mask is None:
            loss_mask = torch.ones_like(token_ids, dtype=torch.bool)
        chains = self._with_something_to_learn(loss_mask, width) if self.follows_some else None
        accepted = []
        total = torch.zeros((), device=token_ids.device)
        for step in unroll(self.head, token_ids, taps, self.num_steps, chains=chains):
            # The verifier's row i predicts token i + 1, hence the shift by one less than the offset.
            rows = slice(step.offset - 1, step.offset - 1 + width)
            learnt = loss_mask[:, step.offset : step.offset + width]
            hidden = step.hidden[learnt if chains is None else learnt.flatten()[chains]]
            part = wanted.rows(rows).where(learnt)
            loss, likeliest = part.totals(self.head.logits(hidden))
            accepted.append(likeliest / len(hidden))
            if self.feature_weight:
                features = taps[:, rows][learnt].float()
                distance = functional.smooth_l1_loss(hidden.float(), features, reduction="none")
                loss = loss + self.feature_weight * distance.mean(-1).sum()
            total = total + self.step_decay ** (step.offset - 2) * loss / learnt.numel()
        self.accepted = accepted
        return total / sum(self.step_decay**step for step in range(self.num_steps))

    def _with_something_to_learn(self, loss_mask: Tensor, width: int) -> Tensor | None:
        """The chains with a token to learn -> int64 [chains]; None where all or none have."""
        learnt = loss_mask.unfold(1, width, 1)[:, 2 : 2 + self.num_steps].any(1)
        return None if learnt.all() or not learnt.any() else learnt.flatten().nonzero()[:, 0]
