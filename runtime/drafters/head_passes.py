"""Interface of compiled passes that replace a drafter's torch operations.

The hook `draft_passes` supplies objects with this interface.
"""

from abc import ABC, abstractmethod
from typing import Any

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree


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
