"""Updates a served verifier's weights, so that a partial update is never served.

Tensors that do not fit are refused before anything is written. If an update does not finish, the tensors that it has
written are torn: they hold weights of an unknown version. An engine with torn tensors serves nothing until an update
has written all of them. If a journal of the previous values is kept, these values are restored instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused, named

logger = logging.getLogger(__name__)


class WrongOrder(RuntimeError):
    """A step of an update was called out of order. The message is one line."""


class WeightUpdate:
    """Successive updates of a verifier's weights.

    Args:
        keeps_journal: whether overwritten values are kept in host memory until the update ends.
    """

    def __init__(self, weights: ServedWeights, keeps_journal: bool = False) -> None:
        self.weights = weights
        self._keeps_journal = keeps_journal
        self._journal: dict[str, list[Any]] = {}
        self._written: set[str] | None = None
        self.torn: set[str] = set()
        """Names of tensors that hold weights of an unknown version."""

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._written is not None

    @property
    def num_written(self) -> int:
        """Number of tensors written in the open update; raises WrongOrder if no update is open."""
        return len(self._opened())

    def start(self) -> None:
        """Begins an update.

        Raises:
            WrongOrder: an update is under way and must end first.
        """
        if self.is_open:
            raise WrongOrder("a weight update is under way: finish it, or abort it")
        self._written = set()

    def write(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Writes tensors. All tensors are checked before the first tensor is written.

        Args:
            read: function that yields the tensors; called twice, so that the tensors need not be kept in memory.

        Raises:
            WrongOrder: no update has begun.
            WeightsRefused: a tensor does not fit; this call wrote no tensor.
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
                # The old value is copied to host memory, because the weight is overwritten next.
                self._journal.setdefault(one, self.weights.save(one))
            written.add(one)
            self.weights.write(one, value)

    def finish(self) -> int:
        """Makes the verifier use the written weights; returns the number of tensors written.

        Raises:
            WrongOrder: no update has begun.
            WeightsRefused: a tensor torn by an earlier update was not written.
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
        """Ends an update that will not be finished.

        Tensors that the update has written are restored from the journal; tensors without a journal entry become torn.
        """
        torn, self._written = self._written or set(), None
        for name, value in self._journal.items():
            self.weights.restore(name, value)
        if self._journal:
            self.weights.finish()
            logger.warning("A weight update was aborted: %d tensors were restored from the journal", len(self._journal))
        self.torn |= torn - self._journal.keys()
        self._journal.clear()

    def lose(self) -> None:
        """Marks all weights as torn, after their memory was released."""
        self.torn = set(self.weights.names())

    def _opened(self) -> set[str]:
        if self._written is None:
            raise WrongOrder("no weight update has started")
        return self._written


def read_files(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of safetensors files with their names; a tensor is memory-mapped when it is yielded.

    Raises:
        WeightsRefused: a file cannot be read.
    """
    for path in paths:
        if not Path(path).is_absolute():
            raise WeightsRefused(f"{path} must be an absolute path")
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe, for example, could wait for ever
            raise WeightsRefused(f"{path} cannot be read: it is no file")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def read_checkpoint(folder: Path, weights: ServedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the checkpoint from which a verifier was loaded, each weight once.

    Raises:
        WeightsRefused: a weight has no tensor of its name in the safetensors files, or a file cannot be read.
    """
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    left = set(weights.names())
    for name, value in read_files(str(path.resolve()) for path in files):
        if name in weights and (one := weights.same(name)) in left:
            left.remove(one)
            yield name, value
    if left:
        raise WeightsRefused(f"{folder} has no tensor named {named(sorted(left))} in its safetensors files")
