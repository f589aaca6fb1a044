"""Losses of draft heads: sums with gradients of their own, and chains that end where drafting ends."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.runtime.training_world import HIDDEN, TAPS, VOCAB, make_head
from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.unroll import unroll
from wingbeat.runtime.training import losses
from wingbeat.runtime.training.losses import DraftLoss, TopTarget, Wanted

LENGTH, STEPS = 14, 3


def batch_of(size: int) -> tuple[Tensor, Tensor, TopTarget]:
    """Texts, taps and the verifier's likeliest tokens, drawn at random."""
    tokens = torch.randint(VOCAB, (size, LENGTH))
    top = torch.randn(size, LENGTH, VOCAB).mul(3).softmax(-1).topk(5)
    return tokens, torch.randn(size, LENGTH, len(TAPS) * HIDDEN), TopTarget(top.indices, top.values)


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("is_dense", [False, True])
def test_totals_have_the_gradient_of_the_summed_cross_entropy(rows_at_once, is_dense, monkeypatch):
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", {"cpu": rows_at_once * 30})
    torch.manual_seed(1)
    probabilities = torch.randn(9, 30).softmax(-1)
    ids = None
    if not is_dense:
        probabilities, ids = probabilities.topk(6)
        probabilities[2] = 0.0  # nothing that can be drafted
    wanted = Wanted(probabilities, probabilities.sum(-1), ids)
    logits = torch.randn(9, 30, requires_grad=True)
    text = logits.argmax(-1).where(torch.arange(9) % 3 > 0, -1)
    total, likeliest, is_right = wanted.totals(logits, text)
    (ours,) = torch.autograd.grad(total * 0.7, logits)
    plain = wanted.cross_entropy(logits).sum()
    (theirs,) = torch.autograd.grad(plain * 0.7, logits)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(likeliest, wanted.among(logits.argmax(-1, keepdim=True)).mass.sum())
    assert torch.equal(is_right, text >= 0)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("begins", ["some", "every"])
def test_a_chain_is_the_same_whether_all_are_followed(num_layers, begins):
    torch.manual_seed(3)
    head = make_head(VOCAB, num_layers)
    tokens, taps, _ = batch_of(3)
    width = LENGTH - STEPS - 1
    # Chains at the end of the first text, none in the second, scattered ones in the third.
    some = torch.tensor([width - 2, width - 1, 2 * width, 2 * width + 4, 2 * width + 5])
    chains = some if begins == "some" else torch.arange(3 * width)
    whole = unroll(head, tokens, taps, STEPS)
    for every, step in zip(whole, unroll(head, tokens, taps, STEPS, some if begins == "some" else None), strict=True):
        torch.testing.assert_close(every.hidden.flatten(0, 1)[chains], step.hidden.flatten(0, -2))
        step.kept = torch.rand(len(chains)) > 0.3
        chains = chains[step.kept]
    assert 0 < len(chains) < len(some) or begins == "every"


def test_the_iteration_ends_with_the_last_chain():
    tokens, taps, _ = batch_of(2)
    steps = unroll(make_head(VOCAB), tokens, taps, STEPS)
    next(steps).kept = torch.zeros(2 * (LENGTH - STEPS - 1), dtype=torch.bool)
    assert not list(steps)


@pytest.mark.parametrize("learnt", ["all", "ends", "scattered", "one", "nothing"])
def test_a_chain_is_learnt_as_far_as_drafting_follows_it(learnt):
    torch.manual_seed(3)
    head = make_head(VOCAB)
    tokens, taps, target = batch_of(3)
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    if learnt == "all":
        mask[:] = True
    elif learnt == "ends":
        mask[0, 6:], mask[1, 12:] = True, True
    elif learnt == "scattered":
        mask = torch.rand(3, LENGTH) > 0.3
    elif learnt == "one":
        mask[1, 7] = True
    # Texts that the head drafts in part, so that chains of every length occur.
    for start, depth in itertools.product((0, 4, 8), range(STEPS)):
        step = list(unroll(head, tokens, taps, STEPS))[depth]
        tokens[:, start + 2 + depth] = head.draft_token_ids[step.logits[:, start].argmax(-1)]
    loss = DraftLoss(head, STEPS, 0.8)
    value = loss(tokens, taps, target, mask)
    value.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    expected, lengths = _learnt_by_hand(head, tokens, taps, loss.wanted(target), mask)
    torch.testing.assert_close(value, expected)
    if learnt in ("all", "ends"):
        assert lengths == list(range(1, STEPS + 1))
    if expected.requires_grad:
        expected.backward()
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def _learnt_by_hand(
    head: DraftHead, tokens: Tensor, taps: Tensor, wanted: Wanted, mask: Tensor
) -> tuple[Tensor, list[int]]:
    """Loss of the chains one by one, and the lengths that occur."""
    width = LENGTH - STEPS - 1
    steps = [step.logits for step in unroll(head, tokens, taps, STEPS)]
    total, lengths = torch.zeros(()), set()
    for text in range(len(tokens)):
        for start in range(width):
            for depth, logits in enumerate(steps):
                row = start + depth + 1
                if not mask[text, row + 1]:
                    break
                probabilities = Wanted(*(None if part is None else part[text, row] for part in wanted))
                total = total + 0.8**depth * probabilities.cross_entropy(logits[text, start])
                lengths.add(depth + 1)
                if head.draft_token_ids[logits[text, start].argmax()] != tokens[text, row + 1]:
                    break
    return total / (len(tokens) * width) / sum(0.8**depth for depth in range(STEPS)), sorted(lengths)
