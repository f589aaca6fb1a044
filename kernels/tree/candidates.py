"""Candidates for the nodes of a draft tree: the likeliest continuations by a drafter's logits.

Torch reference and CPU path; CUDA tensors use the kernel of `kernels.gpu.tree.candidates`.
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.kernels.tree.results import Candidates, Coupling


def top_candidates(
    logits: Tensor,
    draft_token_ids: Tensor,
    top_k: int,
    coupling: Coupling | None = None,
    counters: Tensor | None = None,
) -> Candidates:
    """Likeliest continuations of each node, and their log-probabilities.

    With a coupling, scores are logits / temperature + Gumbel noise, and log-probabilities are the log-softmax of these
    scores. The best candidate is then the likeliest to equal the target's own choice (Daliri et al., arXiv:2408.07978).
    On ties the kernel takes the lower draft index; the CPU path may take either.

    Args:
        logits: [num_reqs, width, draft_vocab_size], any float type.
        draft_token_ids: int64 [draft_vocab_size]: the target's id of each draft token.
        top_k: candidates of a node, 1 to draft_vocab_size.
        counters: `new_counters` of at least num_reqs * (width + 1), for the kernel; None allocates new ones.

    Raises:
        ValueError: top_k is out of range, or draft_token_ids and logits differ in vocabulary size.
    """
    vocab_size = logits.shape[-1]
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k is {top_k}: it must be 1 to {vocab_size}, the size of the draft vocabulary")
    if draft_token_ids.shape != (vocab_size,):
        raise ValueError(
            f"draft_token_ids is {list(draft_token_ids.shape)}: [{vocab_size}] needed, as the logits' columns"
        )
    if kernels := choice.compiled("top_candidates", logits):
        return kernels.top_candidates(logits, draft_token_ids, top_k, coupling, counters)
    scores = _coupled(logits, coupling, draft_token_ids)
    if top_k == 1:  # faster: three passes over the vocabulary instead of five
        likeliest = scores.softmax(dim=-1).max(dim=-1, keepdim=True)
        return Candidates(draft_token_ids[likeliest.indices], likeliest.values.log())
    best = torch.topk(scores, top_k, dim=-1)
    return Candidates(draft_token_ids[best.indices], best.values - torch.logsumexp(scores, dim=-1, keepdim=True))


def _coupled(logits: Tensor, coupling: Coupling | None, token_ids: Tensor) -> Tensor:
    """Scores of tokens in float32: of sampled requests tempered, with noise."""
    scores = logits.to(torch.float32)
    if coupling is None:
        return scores
    sampled = (coupling.temperatures > 0)[:, None]
    noise = gumbel_noise(coupling.seeds, coupling.positions, token_ids).masked_fill_(~sampled, 0.0)
    return scores / torch.where(sampled, coupling.temperatures[:, None], 1.0)[..., None] + noise[:, None]


def new_counters(count: int, device: torch.device) -> Tensor:
    """Allocates counters for `top_candidates`; calls that share counters must not overlap in time."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def top_among(scores: Tensor, token_ids: Tensor, top_k: int, coupling: Coupling | None = None) -> Candidates:
    """`top_candidates` for requests with a few candidates of their own; uses torch operations on every device.

    Args:
        scores: [num_reqs, width, num_candidates], any float type.
        token_ids: int64 [num_reqs, num_candidates]: the target's id of each candidate.
        top_k: candidates of a node, 1 to num_candidates.

    Raises:
        ValueError: top_k is out of range, or token_ids and scores differ in the number of candidates.
    """
    num_candidates = scores.shape[-1]
    if not 1 <= top_k <= num_candidates:
        raise ValueError(f"top_k is {top_k}: it must be 1 to {num_candidates}, the number of candidates")
    if token_ids.shape != (len(scores), num_candidates):
        raise ValueError(
            f"token_ids is {list(token_ids.shape)}: [{len(scores)}, {num_candidates}] needed, as the scores"
        )
    scores = _coupled(scores, coupling, token_ids)
    best = torch.topk(scores, top_k, dim=-1)
    found = token_ids[:, None].expand(-1, scores.shape[1], -1).gather(2, best.indices)
    return Candidates(found, best.values - torch.logsumexp(scores, dim=-1, keepdim=True))
