"""Passes of a drafter's head by other code than torch's operations, as the hook `draft_passes` may give them."""

from abc import ABC, abstractmethod
from typing import Any

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import Outcome, TokenTree


class HeadPasses(ABC):
    """Passes of one drafter over its pool."""

    @abstractmethod
    def resized(self) -> None:
        """The drafter's keys, values and states have moved."""

    @abstractmethod
    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`; chunks are text."""

    @abstractmethod
    def propose(self, batch: DraftBatch, depth: int) -> TokenTree:
        """See `Drafter.propose`.

        Args:
            depth: most levels to grow.
        """

    @abstractmethod
    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `Drafter.answer`."""

    @abstractmethod
    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""

    @abstractmethod
    def prepare(self, head: Any) -> Any:
        """Weights of another head of the same shape as these passes read them; in any thread, while they draft."""

    @abstractmethod
    def take(self, prepared: Any) -> None:
        """Draft with these weights from now on; where this raises, with those before."""
