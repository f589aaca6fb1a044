"""`HeadDrafter`: a drafter with a head over taps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree


class HeadPasses(ABC):
    """The passes of one drafter that commit tokens and propose trees, over the drafter's KV pool."""

    @abstractmethod
    def resized(self) -> None:
        """Read the addresses of the drafter's key, value and state tensors again, after their reallocation."""

    @abstractmethod
    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`; the batch has text chunks only."""

    @abstractmethod
    def propose(self, batch: DraftBatch, depth: int) -> TokenTree:
        """See `Drafter.propose`.

        Args:
            batch: the batch of this pass.
            depth: maximum number of levels to grow.
        """

    @abstractmethod
    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `Drafter.answer`."""

    @abstractmethod
    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""

    @abstractmethod
    def prepare(self, head: Any) -> Any:
        """Convert another head of the same shape to these passes' weight format.

        May run in another thread while these passes draft.
        """

    @abstractmethod
    def use_weights(self, prepared: Any) -> None:
        """Use prepared weights from now on. If this method raises, the previous weights stay in use."""


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
