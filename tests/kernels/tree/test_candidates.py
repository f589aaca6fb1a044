"""Candidates are the best of a log-softmax, with and without the target's noise."""

import pytest
import torch

from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.results import Coupling


def test_candidates_are_the_best_of_a_log_softmax():
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    draft_token_ids = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:50]
    coupling = Coupling(torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, -9, 2**40]), torch.tensor([0, 17, 4]))
    for noise in (None, coupling):
        scores = logits.double()
        if noise is not None:
            drawn = gumbel_noise(noise.seeds, noise.positions, draft_token_ids).double()
            for req in (1, 2):
                scores[req] = scores[req] / noise.temperatures[req].double() + drawn[req]
        log_probs = scores - scores.exp().sum(dim=-1, keepdim=True).log()
        order = log_probs.argsort(dim=-1, descending=True)[..., :4]
        found = top_candidates(logits, draft_token_ids, 4, noise)
        assert torch.equal(found.token_ids, draft_token_ids[order])
        torch.testing.assert_close(found.log_probs.double(), log_probs.gather(-1, order), rtol=1e-5, atol=1e-5)


def test_candidates_outside_the_vocabulary_are_refused():
    logits = torch.zeros(1, 1, 5)
    for top_k in (0, 6):
        with pytest.raises(ValueError, match=f"top_k is {top_k}: it must be 1 to 5"):
            top_candidates(logits, torch.arange(5), top_k)
    with pytest.raises(ValueError, match=r"draft_token_ids is \[4\]"):
        top_candidates(logits, torch.arange(4), 2)
