"""Swaps a drafter's head for another head of the same shape, between two rounds of the drafter's worker."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.head_drafter import HeadDrafter
from wingbeat.runtime.drafters.worker import DraftWorker, RoundObserver
from wingbeat.runtime.verifier.layers.linears import Packable, lay_out_linears

logger = logging.getLogger(__name__)

HeadFailed = Callable[[Exception], object]


class NextHead(NamedTuple):
    """Weights of another head, loaded and checked, that can replace the current head between two rounds."""

    head: Any
    """The head module, on the drafter's device."""
    prepared: Any = None
    """The weights converted by `HeadPasses.prepare`; None if the drafter runs torch operations."""
    source: str = ""
    """Folder of the head; empty if the head is not loaded again for new rows of the verifier."""
    num_renewed: int = 0
    """Number of calls of `HeadSwaps.renew` before the head was loaded."""


class OfferedHead(NamedTuple):
    """A head to be swapped in between two rounds; see `HeadSwaps.offer`."""

    version: int
    head: NextHead
    failed: HeadFailed


class HeadSwaps(RoundObserver):
    """Swaps the head of one worker's drafter; `of` returns the object of a worker."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker
        self._next_head: OfferedHead | None = None
        self._trial: OfferedHead | None = None
        """Head that is being swapped in or has not yet answered a round; None if there is no such head."""
        source = getattr(worker.drafter, "source", "")
        self._served = OfferedHead(self.version, NextHead(None, source=source), lambda error: None)
        """Head that was swapped in last."""
        self._num_renewed = 0
        self._offering = threading.Lock()

    @classmethod
    def of(cls, worker: DraftWorker) -> Self:
        """Return the object that swaps this worker's heads."""
        if not isinstance(worker.observer, cls):
            worker.observer = cls(worker)
        return worker.observer

    @property
    def version(self) -> int:
        """Version of the head that drafts, which every reply contains; 0 is the head from the settings."""
        return self._worker.watch.head_version

    def prepare(self, source: str) -> NextHead:
        """See `prepare_head`."""
        count = self._num_renewed
        return prepare_head(self._worker.drafter, source)._replace(source=source, num_renewed=count)

    def offer(self, version: int, head: NextHead, failed: HeadFailed = lambda error: None) -> None:
        """Draft with another head from the next round on.

        A head that was offered earlier and is not in use yet is dropped.

        Thread-safe.

        Args:
            version: number to report for this head.
            head: result of `prepare`.
            failed: function that is called with the exception if the swap or the first round after the swap fails; the
                worker raises the exception afterwards.
        """
        with self._offering:
            self._offer(OfferedHead(version, head, failed))

    def renew(self, rows: Mapping[str, Tensor]) -> bool:
        """Load the head again with other weights of the verifier, and draft with it from the next round on.

        Returns False if the head holds no copy of these weights.

        Thread-safe.

        Args:
            rows: embedding and output matrix, or one of the two, by the suffix of the name.

        Raises:
            ValueError: the errors of `prepare_head`.
        """
        target = getattr(self._worker.drafter, "target", None)
        with self._offering:
            if target is None or not target.copied & rows.keys():
                return False
            target.newer.update(rows)
            self._num_renewed += 1
            self._offer(self._next_head or self._served)
        return True

    def _offer(self, offered: OfferedHead) -> None:
        if offered.head.source and offered.head.num_renewed != self._num_renewed:
            offered = offered._replace(head=self.prepare(offered.head.source))
        self._next_head = offered

    @torch.inference_mode()
    def take(self) -> bool:
        """Swap to the offered head; returns False if none is offered.

        Call only between two rounds, from the drafting thread.
        """
        if self._next_head is None:
            return False
        self._served = self._trial = offered = self._next_head
        self._next_head = None
        try:
            take_head(self._worker.drafter, offered.head)
        except Exception as error:
            self.failed(error)
            raise
        self._worker.watch.head_version = offered.version
        logger.info("drafting with version %d of the head from this round on", offered.version)
        return True

    @property
    def has_work(self) -> bool:
        """See `RoundObserver.has_work`."""
        return self._next_head is not None

    def before(self) -> None:
        """See `RoundObserver.before`."""
        self.take()

    def failed(self, error: Exception) -> None:
        """See `RoundObserver.failed`; tells the offerer of a head that has not answered a round yet."""
        if self._trial is not None:
            self._trial.failed(error)

    def answered(self) -> None:
        """See `RoundObserver.answered`."""
        self._trial = None


def prepare_head(drafter: Drafter, source: str) -> NextHead:
    """Load and check another head of the same shape for `take_head`.

    May run in another thread while the drafter drafts.

    Args:
        source: folder of the head.

    Raises:
        ValueError: the head has other tensors or shapes, contains non-finite values, or this kind of drafter has no
            head. The message is one line.
    """
    if not isinstance(drafter, HeadDrafter) or drafter.load_head is None:
        raise ValueError(
            f"{type(drafter).__name__} has no head that can be swapped: only EAGLE and one-pass drafters have"
        )
    head, convention = drafter.load_head(source), drafter.head.convention
    if head.convention != convention:
        head = head.with_convention(convention)
    check_alike(head, drafter.head, source)
    lay_out_linears(head.eval().requires_grad_(False))
    return NextHead(head, None if drafter.passes is None else drafter.passes.prepare(head))


def take_head(drafter: HeadDrafter, head: NextHead) -> None:
    """Replace the head's weights; call only between two rounds. Draft KV of existing contexts is kept.

    If graphs are captured, the new weights are copied into the old tensors, because the graphs hold the old tensors'
    addresses. Otherwise the head object is replaced, without a copy.
    """
    if drafter.graph_stats is not None and drafter.device.type != "cpu":
        others = tensors_of(head.head)
        for name, tensor in tensors_of(drafter.head).items():
            # the pointers are equal if the old and the new head use the verifier's tensor
            if tensor.data_ptr() != others[name].data_ptr():
                tensor.copy_(others[name])
        return
    if drafter.passes is not None:
        # `passes` exists only once a verifier is attached. If `prepare_head` ran earlier, `head.prepared` is None
        # although the passes need prepared weights, so the head is converted here.
        drafter.passes.use_weights(drafter.passes.prepare(head.head) if head.prepared is None else head.prepared)
    drafter.head = head.head


def tensors_of(head: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name.

    The weight of a packed layer is replaced by the tensors that its kernel reads.
    """
    found = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    for name, module in head.named_modules():
        packed = module.packed_tensors() if isinstance(module, Packable) else []
        if packed:
            del found[f"{name}.weight"]
            found |= {f"{name}.packed.{index}": part for index, part in enumerate(packed)}
    return found


def check_alike(head: nn.Module, served: nn.Module, source: str) -> None:
    """Check that a head can replace the served head.

    Raises:
        ValueError: names the folder, the tensor and the difference.
    """
    if type(head) is not type(served):
        raise ValueError(f"{source} holds a {type(head).__name__}, but a {type(served).__name__} is served")
    tensors, others = tensors_of(head), tensors_of(served)
    if tensors.keys() != others.keys():
        raise ValueError(
            f"{source} has other tensors than the served head: {', '.join(sorted(tensors.keys() ^ others.keys()))}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape or tensor.dtype != others[name].dtype:
            have, want = (f"{one.dtype} {list(one.shape)}" for one in (tensor, others[name]))
            raise ValueError(f"{name} of {source} is {have}, but {want} in the served head")
        if tensor.data_ptr() == others[name].data_ptr():
            continue  # the verifier's own tensor, which must not be read while the verifier sleeps
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(f"{name} of {source} has values that are not finite")
    if not torch.equal(head.draft_token_ids, served.draft_token_ids):
        raise ValueError(f"{source} has another draft vocabulary than the served head")
