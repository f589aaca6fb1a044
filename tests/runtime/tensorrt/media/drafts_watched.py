"""Drafts of a drafter, by the sequence and the length that they follow."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.near_ties import Drafted, drafted_paths
from tests.runtime.media.media_world import Shown
from wingbeat.runtime.drafters.base import DraftBatch, Drafter
from wingbeat.runtime.protocol.messages import TokenTree


@contextmanager
def drafts_within(kind: type[Drafter], ref: Shown) -> Iterator[dict[tuple[int, int], Drafted]]:
    """Filled with the trees' nodes, by (sequence of `ref`, its length), while it is entered."""
    drafts: dict[tuple[int, int], Drafted] = {}
    propose = kind.propose

    def noted(drafter: Drafter, batch: DraftBatch) -> TokenTree:
        trees = propose(drafter, batch)
        for row, slot in enumerate(batch.proposal_slots.tolist()):
            length = int(batch.committed_lens[slot])
            text = batch.token_ids[slot, :length].tolist()
            [index] = [index for index, tokens in enumerate(ref.sequences) if tokens[:length] == text]
            drafts[index, length] = drafted_paths(trees, row)
        return trees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "propose", noted)
        yield drafts
