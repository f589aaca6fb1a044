"""Divides requests into groups with similar texts, because the quality of a head's drafts depends on the kind of text.

The groups are formed by spherical k-means of token histograms, from the texts' tokens alone and before any head drafts
for the texts.
"""

import torch
from torch import Tensor

WIDTH = 1024
"""Number of entries of a histogram; token ids are counted modulo this number."""
MOST_GROUPS = 4
LEAST_TEXTS, LEAST_SHARE = 12, 0.07
"""Minimum number of texts, and minimum share of all texts, that a group must have to be judged. Texts of smaller groups
count as texts without a group.
"""
_RESTARTS, _ROUNDS = 8, 20


def histogram(token_ids: Tensor) -> Tensor:
    """Square roots of the shares of tokens; the dot product of two histograms is the similarity of their texts, 0 to 1.

    Args:
        token_ids: int [num_tokens], the tokens of a text.

    Returns:
        [WIDTH], of norm 1.
    """
    counts = torch.bincount(token_ids.long() % WIDTH, minlength=WIDTH).float()
    return (counts / counts.sum().clamp(min=1)).sqrt()


class TextGroups:
    """Groups found in a set of texts.

    Args:
        histograms: [num_texts, WIDTH]; if there are only few texts, they form a single group.
    """

    def __init__(self, histograms: Tensor) -> None:
        self.num_texts = len(histograms)
        count = min(max(self.num_texts // LEAST_TEXTS, 1), MOST_GROUPS)
        generator = torch.Generator().manual_seed(0)
        found = [self._clustered(histograms, count, generator) for _ in range(_RESTARTS if count > 1 else 1)]
        self._centres = max(found, key=lambda centres: float((histograms @ centres.T).amax(1).sum()))
        """Centres of the groups, [num_centres, WIDTH]."""
        sizes = torch.bincount((histograms @ self._centres.T).argmax(1), minlength=count).tolist()
        least = min(max(LEAST_TEXTS, LEAST_SHARE * self.num_texts), max(sizes))
        judged = [centre for centre, size in enumerate(sizes) if size >= least]
        self._group_of = {centre: group for group, centre in enumerate(judged)}
        """Number of the judged group, by index of its centre; centres of groups that are not judged are left out."""

    @property
    def count(self) -> int:
        """Number of groups that are judged."""
        return len(self._group_of)

    def find_group(self, histogram: Tensor) -> int | None:
        """Number of a text's group, starting at 0; None if the group is not judged."""
        return self._group_of.get(int((self._centres @ histogram).argmax()))

    @staticmethod
    def _clustered(histograms: Tensor, count: int, generator: torch.Generator) -> Tensor:
        if not len(histograms):
            return torch.zeros(1, WIDTH)
        centres = histograms[torch.randperm(len(histograms), generator=generator)[:count]]
        for _ in range(_ROUNDS):
            members = (histograms @ centres.T).argmax(1)
            sums = torch.zeros_like(centres).index_add_(0, members, histograms)
            # A centre to which no text belongs is not moved.
            centres = torch.where(sums.any(1, keepdim=True), torch.nn.functional.normalize(sums, dim=1), centres)
        return centres
