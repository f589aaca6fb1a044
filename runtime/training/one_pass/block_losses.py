"""Training losses of one-pass heads: each slot learns the verifier's distribution, given the text before the slot."""

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.one_pass.blocks import block_states, parallel_states
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.training.losses import DenseTarget, DraftedIds, TopTarget, Wanted


class BlockLoss(nn.Module):
    """Mean loss of all blocks of a batch, for heads whose slots are independent.

    The loss of a slot is the cross-entropy to the verifier's distribution, with weight `step_decay ** slot`.
    """

    def __init__(self, head: OnePassHead | ParallelEagleHead, step_decay: float) -> None:
        super().__init__()
        self.head = head
        self.step_decay = step_decay
        self.wanted = DraftedIds(head.draft_token_ids, head.config.vocab_size)

    def forward(
        self,
        token_ids: Tensor,
        taps: Tensor,
        target: DenseTarget | TopTarget,
        loss_mask: Tensor | None,
        anchors: Tensor,
    ) -> Tensor:
        """Returns the loss of a batch, a scalar.

        Args:
            token_ids, taps: tokens, int64 [batch, length], and the verifier's taps, [batch, length, taps_size].
            target: the verifier's distributions.
            loss_mask: see `DraftLoss.forward`.
            anchors: int64 [batch, A]: start positions of the blocks.
        """
        hidden = block_states(self.head, token_ids, taps, anchors)
        logits = self.head.logits(hidden).float()
        walk, wanted, slots = self.head.walk_over(logits, hidden), self.wanted(target), logits.unbind(1)
        none = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for depth in range(self.head.config.num_drafted):
            rows = anchors + depth
            # The walk reads the text's tokens instead of the head's drafts. A draft is accepted only if all previous
            # drafts equal the text, so the walk reads the same tokens when drafts are accepted.
            following = walk.step(depth, token_ids.gather(1, rows).flatten()[:, None], none)
            loss = self.of_slot(following, slots[depth], wanted.select_positions(rows), token_ids.gather(1, rows + 1))
            if loss_mask is not None:
                loss = loss * loss_mask.gather(1, rows + 1)
            total = total + self.step_decay**depth * loss.mean()
        return total / sum(self.step_decay**depth for depth in range(self.head.config.num_drafted))

    def of_slot(self, following: Continuations, logits: Tensor, wanted: Wanted, next_ids: Tensor) -> Tensor:
        """Loss of one slot of every block -> [batch, A].

        Args:
            following: the head's continuations [batch * A, 1, ...].
            logits: the slots' uncorrected logits [batch * A, draft_vocab_size].
            wanted: the verifier's distributions [batch, A, ...].
            next_ids: int64 [batch, A]: the tokens that follow in the text.
        """
        return wanted.cross_entropy(_shaped(following.logits, next_ids))


class MarkovLoss(BlockLoss):
    """DSpark's loss: cross-entropy of the corrected logits, plus the loss of the head's confidence that its best token
    is the text's token.

    Source: arXiv 2607.05147.

    Args:
        head: the head.
        step_decay: weight of later slots.
        confidence_weight: weight of the confidence loss.
    """

    def __init__(self, head: OnePassHead, step_decay: float, confidence_weight: float) -> None:
        super().__init__(head, step_decay)
        self.confidence_weight = confidence_weight

    def of_slot(self, following: Continuations, logits: Tensor, wanted: Wanted, next_ids: Tensor) -> Tensor:
        """See `BlockLoss.of_slot`."""
        corrected = _shaped(following.logits, next_ids)
        loss = wanted.cross_entropy(corrected)
        if following.confidence is None:
            return loss
        right = self.wanted.token_ids[corrected.argmax(-1)] == next_ids
        confidence = following.confidence.view(next_ids.shape)
        likely = torch.where(right, confidence, 1 - confidence)
        return loss - self.confidence_weight * likely.clamp_min(1e-6).log()


class LatticeLoss(BlockLoss):
    """DFlash2's loss: cross-entropy of the slots' logits, plus cross-entropy of the candidates' scores, which depend on
    the previous token.
    """

    def of_slot(self, following: Continuations, logits: Tensor, wanted: Wanted, next_ids: Tensor) -> Tensor:
        """See `BlockLoss.of_slot`."""
        candidates = self.wanted.index[following.token_ids].view(*next_ids.shape, -1)
        scores = _shaped(following.logits, next_ids)
        own = wanted.cross_entropy(logits.view(*next_ids.shape, -1))
        return own + wanted.among(candidates).cross_entropy(scores)


class ParallelLoss(BlockLoss):
    """P-EAGLE's loss. Each pair of a feature and a token predicts the token after its own. The masked slots after the
    pair at an anchor predict the tokens that follow the pair's prediction.

    The loss of a prediction is the cross-entropy to the verifier's distribution, with weight `step_decay ** depth`.

    Args:
        head: the head.
        num_drafted: number of tokens drafted in a pass.
        step_decay: weight of later tokens.
    """

    def __init__(self, head: ParallelEagleHead, num_drafted: int, step_decay: float) -> None:
        super().__init__(head, step_decay)
        self.num_drafted = num_drafted

    def forward(
        self,
        token_ids: Tensor,
        taps: Tensor,
        target: DenseTarget | TopTarget,
        loss_mask: Tensor | None,
        anchors: Tensor,
    ) -> Tensor:
        """See `BlockLoss.forward`."""
        pairs, slots = parallel_states(self.head, token_ids, taps, anchors, self.num_drafted)
        wanted = self.wanted(target)
        # The pair at index i takes the token at i + 1 as input and predicts the token at i + 2, so its target is the
        # verifier's row i + 1.
        known = torch.arange(1, token_ids.shape[1] - 1, device=anchors.device).expand(len(token_ids), -1)
        total = self._mean(self.head.logits(pairs[:, :-1]), wanted, known, loss_mask)
        for depth in range(1, self.num_drafted):
            logits = self.head.logits(slots[:, :, depth - 1])
            total = total + self.step_decay**depth * self._mean(logits, wanted, anchors + depth, loss_mask)
        return total / sum(self.step_decay**depth for depth in range(self.num_drafted))

    def _mean(self, logits: Tensor, wanted: Wanted, rows: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Mean cross-entropy of logits [batch, N, draft_vocab_size] to the verifier's distributions at `rows`, int64
        [batch, N].
        """
        loss = wanted.select_positions(rows).cross_entropy(logits.float())
        return (loss if loss_mask is None else loss * loss_mask.gather(1, rows + 1)).mean()


def _shaped(logits: Tensor, like: Tensor) -> Tensor:
    """Logits [batch * A, 1, K] -> [batch, A, K]."""
    return logits.reshape(*like.shape, -1)
