"""`HeadDrafter`: a drafter with a head over taps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.head_passes import HeadPasses
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree


class HeadDrafter(StagedDrafter):
    """Base of drafters with a head. Subclasses set `head` before the first `resize`."""

    head: Any
    """The head's weights, on the drafter's device."""
    load_head: Callable[[str], Any] | None = None
    """Loads another head from a folder with this head's options; None if swapping is not supported."""
    source: str = ""
    """Folder of the head from the settings."""
    target: TargetDescription | None = None
    """Verifier whose embedding and output matrix `load_head` uses for heads that have none."""
    hidden: Tensor = torch.zeros(0)
    """State of each slot, for kinds of drafters that keep state; the float type is that of the code that writes the
    state."""
    passes: HeadPasses | None = None
    """Compiled passes that replace torch operations; None if torch runs them."""

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        super().resize(spec, num_slots, num_blocks)
        if self.passes is not None:
            self.passes.resized()
        elif not self.fixed_shapes:
            self.passes = first_result("draft_passes", self)

    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""
        if self.passes is not None:
            self.passes.try_threads(most)

    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`."""
        if self.passes is None:
            super().commit(batch)
            return
        if batch.chunk_inputs is not None:  # passes accept text chunks only
            self._commit_chunks(batch)
            batch = batch.without_chunks()
        self.passes.commit(batch)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter.propose`."""
        if self.passes is None:
            return super().propose(batch)
        return self.passes.propose(batch, self.growth.depth(batch))

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `Drafter.answer`."""
        return self.passes is not None and self.passes.answer(end, outcome)

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size != self.head.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: this head needs {self.head.taps_size}")
