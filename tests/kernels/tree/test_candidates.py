"""Candidates are the best of a log-softmax, with and without the target's noise."""

import pytest
import torch

from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.kernels.tree.candidates import top_among, top_candidates
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


def test_candidates_of_each_request_are_ranked_as_the_vocabulary_is():
    """Equal to `top_candidates` where every token but a request's own candidates has the score -inf."""
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.stack([torch.randperm(50, generator=generator)[:7] for _ in range(3)])
    scores = torch.randn(3, 2, 7, generator=generator)
    everywhere = torch.full((3, 2, 50), float("-inf")).scatter(2, token_ids[:, None].expand(-1, 2, -1), scores)
    coupling = Coupling(torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, -9, 2**40]), torch.tensor([0, 17, 4]))
    for noise in (None, coupling):
        found = top_among(scores, token_ids, 4, noise)
        expected = top_candidates(everywhere, torch.arange(50), 4, noise)
        assert torch.equal(found.token_ids, expected.token_ids)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)


def test_candidates_that_are_not_the_requests_are_refused():
    for top_k in (0, 4):
        with pytest.raises(ValueError, match=f"top_k is {top_k}: it must be 1 to 3"):
            top_among(torch.zeros(2, 1, 3), torch.zeros(2, 3, dtype=torch.int64), top_k)
    with pytest.raises(ValueError, match=r"token_ids is \[3\]: \[2, 3\] needed"):
        top_among(torch.zeros(2, 1, 3), torch.arange(3), 2)
