"""Training losses of heads: distillation from the verifier's next-token distributions and, for EAGLE-1, also from its
hidden states.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.unroll import unroll

_LOGITS_AT_ONCE = {"cpu": 2**20}
"""Number of logits that a cross-entropy processes at once, by device type. The number for CPUs is chosen so that the
logits fit into the cache.
"""
_MOST_LOGITS_AT_ONCE = 2**26
"""Number of logits that a cross-entropy processes at once on all other devices; 256 MiB in float32."""


class DenseTarget(NamedTuple):
    """The verifier's distributions as logits over its whole vocabulary."""

    logits: Tensor
    """[batch, length, vocab_size]; row i is the prediction of token i + 1."""


class TopTarget(NamedTuple):
    """The verifier's distributions as a recording contains them: the likeliest tokens only."""

    token_ids: Tensor
    """int64 [batch, length, top_k]; row i predicts token i + 1."""
    probabilities: Tensor
    """float32 [batch, length, top_k], from the softmax over all tokens. How the remaining probability is distributed
    over the other tokens is unknown.
    """


class Wanted(NamedTuple):
    """The draftable part of the verifier's distributions, in draft ids."""

    probabilities: Tensor
    """Probabilities of the draftable tokens, [batch, length, K]."""
    mass: Tensor
    """[batch, length]: sum of the probabilities at each position."""
    draft_ids: Tensor | None
    """int64 [batch, length, K]: draft id of each probability; None if K is the whole draft vocabulary."""

    def select_positions(self, rows: Tensor) -> "Wanted":
        """These distributions at the positions `rows` of each sequence, int64 [batch, N]."""
        return self.at(torch.arange(len(rows), device=rows.device)[:, None], rows)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Cross-entropy of a head's logits [batch, length, draft_vocab_size] -> [batch, length]."""
        mine = logits if self.draft_ids is None else logits.gather(-1, self.draft_ids)
        # Equals -sum(p * log_softmax(x)), with one pass fewer over the logits of the whole vocabulary.
        return self.mass * logits.logsumexp(-1) - (self.probabilities * mine).sum(-1)

    def totals(self, logits: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums two quantities over the rows of a head's logits [rows, draft_vocab_size]. The fields of this object must
        have the shape [rows, ...].

        Args:
            logits: the head's.
            text: int64 [rows], draft ids of the text's tokens; -1 for tokens that cannot be drafted.

        Returns:
            The sum of the cross-entropies; and, without gradients, the sum of the probabilities that the verifier gives
            to the likeliest drafts, and whether the likeliest draft is the text's token, bool [rows].
        """
        return _Totals.apply(logits, *self, text)

    def at(self, sequences: Tensor, rows: Tensor) -> "Wanted":
        """These distributions at single positions, given as indices of one shape each."""
        return Wanted(*(None if part is None else part[sequences, rows] for part in self))

    def among(self, candidates: Tensor) -> "Wanted":
        """These distributions restricted to the draft ids `candidates`, int64 [batch, length, C]. The probabilities of
        other ids are dropped.
        """
        if self.draft_ids is None:
            probabilities = self.probabilities.gather(-1, candidates)
        else:
            same = candidates[..., None] == self.draft_ids[..., None, :]
            probabilities = (same * self.probabilities[..., None, :]).sum(-1)
        return Wanted(probabilities, probabilities.sum(-1), None)


class _Totals(Function):
    """`Wanted.totals` with the gradient computed in the forward pass.

    The logits are the largest tensor of a step. They are read only once, in groups of rows that fit a CPU's cache, and
    their gradient is saved in their place.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probabilities: Tensor, mass: Tensor, draft_ids: Tensor | None, text: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns two float32 scalars and bool [rows]; see `Wanted.totals`."""
        total, likeliest = torch.zeros((), device=logits.device), torch.zeros((), device=logits.device)
        gradient, is_right = torch.empty_like(logits), torch.empty_like(text, dtype=torch.bool)
        size = max(1, _LOGITS_AT_ONCE.get(logits.device.type, _MOST_LOGITS_AT_ONCE) // logits.shape[-1])
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            scores, wanted = logits[rows].float(), probabilities[rows].float()
            # `exp` and `logsumexp` are far slower than `softmax` on a CPU where numbers underflow.
            softmax, (best, index) = scores.softmax(-1), scores.max(-1)
            level = best - softmax.gather(-1, index[:, None])[:, 0].log()
            mine = scores if draft_ids is None else scores.gather(-1, draft_ids[rows])
            is_right[rows] = index == text[rows]
            total += (mass[rows] * level).sum() - (wanted * mine).sum()
            likeliest += (wanted * (mine >= best[:, None])).sum()
            softmax.mul_(mass[rows][:, None])
            if draft_ids is None:
                softmax -= wanted
            else:
                softmax.scatter_add_(-1, draft_ids[rows], -wanted)
            gradient[rows] = softmax
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(likeliest, is_right)
        return total, likeliest, is_right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None


class DraftedIds(nn.Module):
    """Maps a verifier's distributions to the tokens that a head can draft.

    The probabilities are not scaled to a sum of 1, although tokens outside the draft vocabulary and tokens that were
    not recorded are missing. A position therefore has less weight in the loss if its likely tokens cannot be drafted or
    were not recorded.

    Args:
        draft_token_ids: int64 [draft_vocab_size], target id of each draft id.
        vocab_size: size of the target vocabulary.
    """

    token_ids: Tensor
    index: Tensor
    """int64 [vocab_size]: draft id of each token, -1 for tokens that cannot be drafted."""

    def __init__(self, draft_token_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        index = torch.full((vocab_size,), -1, device=draft_token_ids.device)
        index[draft_token_ids] = torch.arange(len(draft_token_ids), device=draft_token_ids.device)
        self.register_buffer("token_ids", draft_token_ids, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def forward(self, target: DenseTarget | TopTarget) -> Wanted:
        """The draftable part of the distributions."""
        if isinstance(target, DenseTarget):
            probabilities = target.logits.float().softmax(-1)[..., self.token_ids]
            return Wanted(probabilities, probabilities.sum(-1), None)
        index = self.index[target.token_ids]
        probabilities = target.probabilities * (index >= 0)
        return Wanted(probabilities, probabilities.sum(-1), index.clamp_min(0))


class DraftLoss(nn.Module):
    """Mean loss of all chains of a batch; `forward` unrolls the head over the steps of the chains.

    The loss of a step of a chain is the cross-entropy to the verifier's distribution; later steps of a chain have
    smaller weights. A chain ends where drafting would end: at the first step whose likeliest draft is not the text's
    token. At an acceptance of 0.55 this halves the work, and no step is spent on states that drafting never reaches.

    Args:
        head: the head.
        num_steps: length of the chains.
        step_decay: weight of step j is `step_decay ** j`, divided by the sum of the weights.
        feature_weight: weight of the smooth-L1 distance between the chain's hidden states and the verifier's; the taps
            must then be the verifier's last hidden states. 0 disables the distance. EAGLE-1 (arXiv 2401.15077, section
            4.1) uses weight 10 for the distance and 1 for the cross-entropy.
        ends_chains: whether chains end. With False, all chains run all steps; some heads require whole batches.
    """

    def __init__(
        self,
        head: DraftHead,
        num_steps: int,
        step_decay: float,
        feature_weight: float = 0.0,
        ends_chains: bool = True,
    ) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.step_decay = step_decay
        self.feature_weight = feature_weight
        self.ends_chains = ends_chains
        self.accepted: list[Tensor] = []
        """For each step of the chains of the last pass, the mean probability that the verifier gives to the head's
        likeliest draft.
        """
        self.wanted = DraftedIds(head.draft_token_ids, head.get_submodule("embed_tokens").weight.shape[0])

    def forward(
        self, token_ids: Tensor, taps: Tensor, target: DenseTarget | TopTarget, loss_mask: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of a batch, a scalar.

        Args:
            token_ids, taps: tokens, int64 [batch, length], and the verifier's taps, [batch, length, taps_size].
            target: the verifier's distributions.
            loss_mask: bool [batch, length], False for tokens not to be learnt. Predictions of such tokens count with
                loss 0, so that the mean over the parts of a batch equals the mean over the batch.
        """
        wanted = self.wanted(target)
        width = token_ids.shape[1] - self.num_steps - 1
        if loss_mask is None:
            loss_mask = torch.ones_like(token_ids, dtype=torch.bool)
        every = torch.arange(len(token_ids) * width, device=token_ids.device)
        first = every[loss_mask[:, 2 : 2 + width].flatten()]
        followed = first if self.ends_chains and len(first) else None
        drafts = self.wanted.index[token_ids]
        accepted = []
        total = torch.zeros((), device=token_ids.device)
        for step in unroll(self.head, token_ids, taps, self.num_steps, chains=followed):
            chains = every if step.chains is None else step.chains
            # Row i of the verifier predicts token i + 1, and a step predicts the token at a chain's start + `offset`.
            sequences, rows = chains // width, chains % width + step.offset - 1
            learnt = loss_mask[sequences, rows + 1]
            sequences, rows = sequences[learnt], rows[learnt]
            hidden = step.hidden.flatten(0, -2)[learnt]
            part, text = wanted.at(sequences, rows), drafts[sequences, rows + 1]
            loss, likeliest, is_right = part.totals(self.head.logits(hidden), text)
            accepted.append(likeliest / len(hidden))
            if self.feature_weight:
                features = taps[sequences, rows].float()
                distance = functional.smooth_l1_loss(hidden.float(), features, reduction="none")
                loss = loss + self.feature_weight * distance.mean(-1).sum()
            total = total + self.step_decay ** (step.offset - 2) * loss / len(every)
            if followed is not None:
                step.kept = learnt.masked_scatter(learnt, is_right)
        self.accepted = accepted
        return total / sum(self.step_decay**step for step in range(self.num_steps))
