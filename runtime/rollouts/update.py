"""An update of a served verifier's weights: never half of one is served.

What does not fit is refused before a byte of it is written. What was written of an update that does not end is torn:
nobody knows which weights the tensor has. An engine with torn tensors serves nothing until an update has written all
of them; a journal, which holds what was there, puts them back instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused, named

logger = logging.getLogger(__name__)


class WrongOrder(RuntimeError):
    """A step of an update is asked for out of order; one line."""


class WeightUpdate:
    """Updates of a verifier's weights, one after another.

    Args:
        keeps_journal: hold what is written over in host memory until an update ends.
    """

    def __init__(self, weights: ServedWeights, keeps_journal: bool = False) -> None:
        self.weights = weights
        self._keeps_journal = keeps_journal
        self._journal: dict[str, Tensor] = {}
        self._written: set[str] | None = None
        self.torn: set[str] = set()
        """Tensors of which nobody knows which weights they have."""

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._written is not None

    @property
    def num_written(self) -> int:
        """Tensors that the open update has written; raises WrongOrder where there is none."""
        return len(self._opened())

    def start(self) -> None:
        """Begin an update.

        Raises:
            WrongOrder: one is under way, which has to end first.
        """
        if self.is_open:
            raise WrongOrder("a weight update is under way: finish it, or abort it")
        self._written = set()

    def write(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Write tensors, of which all are looked at before the first one is written.

        Args:
            read: reads them, one after another; called twice, so that none has to be kept meanwhile.

        Raises:
            WrongOrder: no update has begun.
            WeightsRefused: one does not fit; nothing was written of these.
        """
        written = self._opened()
        named_once = set(written)
        for name, value in read():
            self.weights.check(name, tuple(value.shape), value.dtype)
            if (one := self.weights.same(name)) in named_once:
                raise WeightsRefused(f"{name} is written twice in one update")
            named_once.add(one)
            self.weights.converted(name, value)
        if named_once == written:
            raise WeightsRefused("no tensors are given")
        for name, given in read():
            one, value = self.weights.same(name), self.weights.converted(name, given)
            if self._keeps_journal and one not in self.torn:
                # Written over while it is read: a copy, in host memory.
                self._journal.setdefault(one, self.weights.read(one).detach().to("cpu", copy=True))
            written.add(one)
            self.weights.write(one, value)

    def finish(self) -> int:
        """Let the verifier compute by what was written; returns of how many tensors.

        Raises:
            WrongOrder: no update has begun.
            WeightsRefused: tensors that an update before this one left torn are not among those that were written.
        """
        written = self._opened()
        left = sorted(self.torn - written)
        if left:
            raise WeightsRefused(
                f"{len(left)} tensors are unknown since an update that did not end, or a sleep of level 2, and this "
                f"update has not written them: {named(left)}"
            )
        self.weights.finish()
        self.torn.clear()
        self._journal.clear()
        self._written = None
        return len(written)

    def abandon(self) -> None:
        """End an update that will not be finished: its tensors are torn, or what the journal has of them."""
        torn, self._written = self._written or set(), None
        for name, value in self._journal.items():
            self.weights.write(name, self.weights.converted(name, value))
        if self._journal:
            self.weights.finish()
            logger.warning("%d tensors have the weights again that an update has not replaced", len(self._journal))
        self.torn |= torn - self._journal.keys()
        self._journal.clear()

    def lose(self) -> None:
        """Know no weight any more, after their memory was given back."""
        self.torn = set(self.weights.names())

    def _opened(self) -> set[str]:
        if self._written is None:
            raise WrongOrder("no weight update has started")
        return self._written


def read_files(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files by name, one after another; they lie in the files' pages.

    Raises:
        WeightsRefused: a file cannot be read.
    """
    for path in paths:
        if not Path(path).is_absolute():
            raise WeightsRefused(f"{path} must be an absolute path")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{path} cannot be read: {' '.join(str(error).split())}") from None
