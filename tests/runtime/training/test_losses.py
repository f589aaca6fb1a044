"""Losses of draft heads: sums with gradients of their own, and chains that have nothing to learn left out."""

import pytest
import torch
from torch import Tensor

from tests.runtime.training_world import HIDDEN, TAPS, VOCAB, make_head
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
    total, likeliest = wanted.totals(logits)
    (ours,) = torch.autograd.grad(total * 0.7, logits)
    plain = wanted.cross_entropy(logits).sum()
    (theirs,) = torch.autograd.grad(plain * 0.7, logits)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(likeliest, wanted.among(logits.argmax(-1, keepdim=True)).mass.sum())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_chain_is_the_same_whether_all_are_followed(num_layers):
    torch.manual_seed(3)
    head = make_head(VOCAB, num_layers)
    tokens, taps, _ = batch_of(3)
    width = LENGTH - STEPS - 1
    # Chains at the end of the first text, none in the second, scattered ones in the third.
    chains = torch.tensor([width - 2, width - 1, 2 * width, 2 * width + 4, 2 * width + 5])
    every, some = unroll(head, tokens, taps, STEPS), unroll(head, tokens, taps, STEPS, chains=chains)
    for whole, followed in zip(every, some, strict=True):
        torch.testing.assert_close(whole.hidden.flatten(0, 1)[chains], followed.hidden)


@pytest.mark.parametrize("learnt", ["ends", "scattered", "one", "nothing"])
def test_a_mask_has_the_loss_and_gradients_of_whole_batches(learnt):
    torch.manual_seed(3)
    head = make_head(VOCAB)
    tokens, taps, target = batch_of(3)
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    if learnt == "ends":
        mask[0, 6:], mask[1, 12:] = True, True
    elif learnt == "scattered":
        mask = torch.rand(3, LENGTH) > 0.6
    elif learnt == "one":
        mask[1, 7] = True
    outcomes = []
    for follows_some in (True, False):
        head.zero_grad()
        loss = DraftLoss(head, STEPS, 0.8, follows_some=follows_some)
        value = loss(tokens, taps, target, mask)
        value.backward()
        outcomes.append((value.detach(), {name: p.grad for name, p in head.named_parameters() if p.grad is not None}))
    (some, gradients), (whole, expected) = outcomes
    torch.testing.assert_close(some, whole)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
