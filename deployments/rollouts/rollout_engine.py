"""An engine whose rounds can be held: no rounds run while the engine is paused, sleeps, or its weights are being
updated.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.rollouts.weight_transfer import WeightTransfer
from wingbeat.deployments.rollouts.wire import PAUSE_MODES, Finished, OperationResult
from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.rollouts.sleep_memory import TAGS, WEIGHTS, memory_of
from wingbeat.runtime.rollouts.update import WeightUpdate, WrongOrder
from wingbeat.runtime.scheduling.request import FinishReason, Request, RequestOutput
from wingbeat.runtime.verifier_errors import BackendLost

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.protocol.ends import VerifierEnd
    from wingbeat.runtime.rollouts.head_update import HeadUpdate
    from wingbeat.runtime.scheduling.maskers import CompiledGrammar

logger = logging.getLogger(__name__)


class RolloutEngine:
    """A `ServedEngine` around another engine, which runs no rounds while it is held.

    Args:
        keeps_journal: see `WeightUpdate`.
        backend, head_update, checkpoint: see `WeightTransfer`.
    """

    def __init__(
        self,
        engine: "Engine",
        keeps_journal: bool = False,
        backend: str | None = None,
        head_update: "Callable[[], HeadUpdate] | None" = None,
        checkpoint: Path | None = None,
    ) -> None:
        self.inner = engine
        self._update = WeightUpdate(ServedWeights(engine.loaded), keeps_journal)
        self._transfer = WeightTransfer(
            self._update, engine.loaded.device, self._answered, backend, head_update, checkpoint
        )
        self._memory = memory_of(engine.loaded, engine.cache.layers)
        self._sums = False
        self._paused = self._draining = False
        self._drained: list[Future[OperationResult]] = []
        self._asleep: set[str] = set()
        self._came_late: VerifierEnd | None = None
        """Channel of a drafter that is attached once passes of the verifier may run again."""
        self._later: dict[str, tuple[Request, CompiledGrammar | None]] = {}
        """Requests that arrived during a drain (a pause in mode `wait`) and wait for its end."""
        self._outputs: list[RequestOutput] = []
        self._version: str | None = None
        self._lost: str | None = None
        """Why the engine cannot go on, for example because one of its ranks is gone; None if it can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def tell_round(self) -> Callable[[int, list[str]], object]:
        """See `ServedEngine.tell_round`."""
        return self.inner.tell_round

    @tell_round.setter
    def tell_round(self, tell: Callable[[int, list[str]], object]) -> None:
        self.inner.tell_round = tell

    @property
    def drafter_state(self) -> str:
        """See `ServedEngine.drafter_state`."""
        return "attached" if self._came_late is not None else self.inner.drafter_state

    def attach_drafter(self, end: "VerifierEnd") -> None:
        """See `Engine.attach_drafter`; during a sleep or an update the drafter is attached afterwards, because the
        engine may run passes of the verifier to measure their cost.
        """
        if self._has_weights:
            self.inner.attach_drafter(end)
        else:
            self._came_late = end

    def detach_drafter(self) -> None:
        """See `DrafterClient.detach`."""
        self._came_late = None
        self.inner.detach_drafter()

    @property
    def is_held(self) -> bool:
        """Whether no rounds may run now."""
        return self._paused or not self._has_weights

    @property
    def _has_weights(self) -> bool:
        """Whether passes of the verifier may run, because its weights and memory are there and nothing changes them."""
        return not (self._asleep or self._update.is_open or self._update.torn)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        has_more = self.inner.has_unfinished_requests()
        # An abort may end the last request of a drain. The inner engine then has no work left, so `step` must be called
        # once more to notice that the drain has ended.
        is_due = self._lost is not None or bool(self._outputs) or (self._draining and not has_more)
        is_due = is_due or (self._came_late is not None and self._has_weights)
        return is_due or (not self.is_held and has_more)

    def step(self) -> list[RequestOutput]:
        """See `Engine.step`; raises the errors of the inner engine's step, and RoundFailed if the engine is lost."""
        if self._lost is not None:
            raise RoundFailed(self._lost)
        if self._came_late is not None and self._has_weights:
            end, self._came_late = self._came_late, None
            self.inner.attach_drafter(end)
        outputs, self._outputs = self._outputs, []
        if not self.is_held and self.inner.has_unfinished_requests():
            outputs += self.inner.step()
        if self._draining and not self.inner.has_unfinished_requests():
            self._hold(self._clears)
            self._end_drain()
        return outputs

    def add_request(self, request: Request, grammar: "CompiledGrammar | None" = None) -> None:
        """See `Engine.add_request`; during a drain the request waits."""
        if self._draining or (self._paused and self._later):
            self._later[request.request_id] = request, grammar
        else:
            self.inner.add_request(request, grammar)

    def abort_request(self, request_id: str) -> Any:
        """See `Engine.abort_request`."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        return None if self._later.pop(request_id, None) else self.inner.abort_request(request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request still waits, that is, none of its tokens has been computed."""
        return request_id in self._later or self.inner.is_waiting(request_id)

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`; the check is skipped while requests are held, because held requests keep their
        blocks.
        """
        if not self.inner.has_unfinished_requests():
            self.inner.check_integrity()

    def operations(self) -> dict[str, Callable[..., Any]]:
        """Return the operations for routers, by name; each operation returns an `OperationResult`."""
        own = [self.pause, self.resume, self.is_paused, self.abort_requests]
        own += [self.check_sleep, self.sleep, self.wake_up, self.is_sleeping]
        own += [self.init_transfer, self.start_update, self.start_head_update, self.update_weights]
        own += [self.num_written, self.finish_update, self.abandon_update, self.lose_weights]
        own += [self.scramble_weights, self.weight_version, self.weight_checksums]
        return {one.__name__: partial(self._answered, one) for one in own}

    def _answered(self, operation: Callable[..., Any], *arguments: Any) -> "OperationResult | Future[OperationResult]":
        try:
            value = operation(*arguments)
        except WeightsRefused as error:
            return self._told(refused=str(error))
        except WrongOrder as error:
            return self._told(conflict=str(error))
        except BackendLost as error:
            self._lost = str(error)
            return self._told(conflict=f"the engine starts again: {error}")
        return value if isinstance(value, Future) else self._told(value)

    def _told(self, value: Any = None, refused: str | None = None, conflict: str | None = None) -> OperationResult:
        serves = self._lost is None and not self._update.torn
        return OperationResult(value, refused, conflict, serves, self._transfer.is_open)

    # Rounds

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> "Future[OperationResult] | None":
        """Stop running rounds.

        Args:
            mode: `abort` ends all requests; with `wait`, requests finish first and the method's future completes after
                that; with `keep`, requests continue after `resume`.
            clear_cache: whether to drop cached prefixes; ignored in mode `keep`.

        Raises:
            WeightsRefused: the mode is unknown.
        """
        if mode not in PAUSE_MODES:
            raise WeightsRefused(f"mode is {mode!r}: must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait" and not self.is_held and self.inner.has_unfinished_requests():
            self._draining, done = True, Future()
            self._clears = clear_cache
            self._drained.append(done)
            return done
        if mode == "keep":
            self._end_drain("another call has suspended the requests before all had finished")
        self._outputs += self.inner.settle()
        if mode == "abort":
            self.abort_requests()
        self._hold(clear_cache and mode != "keep")
        return None

    def resume(self) -> None:
        """Run rounds again, and add the requests that waited.

        Raises:
            WrongOrder: the engine sleeps; it must be woken by `wake_up` first.
        """
        if self._asleep:
            raise WrongOrder(f"the engine sleeps without its {' and '.join(sorted(self._asleep))}: wake it up")
        self._paused = False
        self._end_drain("the pause was ended before all requests had finished")
        self._add_later()

    def is_paused(self) -> bool:
        """Whether rounds are held by a pause or a sleep."""
        return self._paused or bool(self._asleep)

    def abort_requests(self, request_ids: list[str] | None = None) -> int:
        """End requests with the tokens that they have so far; returns the number of requests that were ended.

        Args:
            request_ids: the engine's ids of the requests; None ends all requests.
        """
        self._outputs += self.inner.settle()
        scheduler = self.inner.scheduler
        found = [seq.request.request_id for seq in (*scheduler.running, *scheduler.waiting)] + list(self._later)
        ended = [one for one in found if request_ids is None or one in request_ids]
        for request_id in ended:
            metrics = None if self._later.pop(request_id, None) else self.inner.abort_request(request_id)
            self._outputs.append(RequestOutput(request_id, (), FinishReason.ABORT, metrics or SpeculationMetrics()))
        return len(ended)

    def _hold(self, clears: bool) -> None:
        self._paused = True
        if clears:
            self.inner.reset_prefix_cache()

    def _end_drain(self, conflict: str | None = None) -> None:
        """Answers the callers that wait for the end of all requests."""
        self._draining = False
        drained, self._drained = self._drained, []
        for done in drained:
            done.set_result(self._told(conflict=conflict))

    def _add_later(self) -> None:
        later, self._later = self._later, {}
        for request, grammar in later.values():
            try:
                self.inner.add_request(request, grammar)
            except ValueError as error:
                failed = RequestOutput(request.request_id, (), FinishReason.ABORT, failure=str(error), is_refusal=True)
                self._outputs.append(failed)

    # Memory

    def check_sleep(self, level: int) -> None:
        """Check whether a sleep is possible; called before anything is paused for the sleep.

        Raises:
            WeightsRefused: the level is unknown, or this engine's memory cannot be freed.
            WrongOrder: weights are being updated.
        """
        if level not in (0, 1, 2):
            raise WeightsRefused(f"level is {level}: must be 0, 1 or 2")
        if level and self._memory.problem is not None:
            raise WeightsRefused(self._memory.problem)
        if self._update.is_open:
            raise WrongOrder("a weight update is under way: finish it, or abort it")

    def sleep(self, level: int = 1) -> None:
        """Hold rounds and free the memory of the KV cache and, on a GPU or at level 2, the memory of the weights.

        After the wake-up, requests that were kept are prefilled again. At level 1 the weights' values are kept in host
        memory; after level 2 all weights must be written by an update.

        Raises:
            WrongOrder: the host's memory does not hold the weights, or the errors of `check_sleep`.
            WeightsRefused: see `check_sleep`.
        """
        self.check_sleep(level)
        self._paused = True
        if not level:
            return
        self._outputs += self.inner.recompute()
        try:
            self._memory.free(level)
        except MemoryError as error:
            raise WrongOrder(f"the weights cannot be kept in host memory: {error}") from None
        self._asleep |= self._memory.freed(level)
        rows = self.inner.loaded.parts.get("rows")
        logger.info(
            "asleep at level %d without %s; the drafter's process keeps %.0f MB on the GPU, and copies of the "
            "verifier's embedding and output matrix take %.0f MB of host memory",
            level,
            " and ".join(sorted(self._asleep)),
            self.inner.needs.held_bytes / 1e6,
            getattr(rows, "num_bytes", 0) / 1e6,
        )
        if level == 2:
            self._update.lose()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore memory that a sleep has freed; rounds run again once all of the memory is restored.

        Args:
            tags: kinds of memory to restore, from TAGS; None restores all memory.

        Raises:
            WeightsRefused: a tag is unknown.
            WrongOrder: the device has not enough free memory, or tensors are arriving.
        """
        self._transfer.check_settled()
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise WeightsRefused(f"tags names {unknown[0]!r}: must be of {', '.join(TAGS)}")
        for tag in TAGS if tags is None else tags:
            try:
                self._memory.restore(tag)
            except CudaError as error:
                raise WrongOrder(f"the device has no memory for the {tag}: {error}") from None
            self._asleep.discard(tag)
        if not self._asleep:
            self.resume()

    def is_sleeping(self) -> bool:
        """Return whether a sleep has freed memory that is not restored yet."""
        return bool(self._asleep)

    # Weights

    def init_transfer(self, info: dict[str, Any], index: int) -> "Future[OperationResult] | None":
        """Prepare for the updates that a trainer will send; an open update of an earlier trainer is ended.

        Args:
            info: vLLM's `init_info` of a broadcasting trainer: master_address, master_port, rank_offset, world_size.
            index: index of this engine among all engines.

        Raises:
            WeightsRefused: the trainer cannot be reached, or a field is wrong.
        """
        return self._transfer.join(info, index)

    def start_update(self) -> None:
        """Begin an update; no rounds run until it is finished.

        Raises:
            WrongOrder: an update is open, or the memory of the weights is freed by a sleep.
        """
        self._check_awake()
        self._transfer.check_closed()
        self._update.start()
        self._sums = False
        self._outputs += self.inner.settle()

    def start_head_update(self) -> None:
        """Begin an update of the draft head; rounds continue.

        Raises:
            WeightsRefused: there is no draft head to update.
            WrongOrder: an update is open.
        """
        self._transfer.start_head()

    def update_weights(self, info: dict[str, Any], checksum: bool = False) -> "Future[OperationResult]":
        """Write tensors of the open update; the tensors are read from files or received from the trainer's broadcast.

        Args:
            info: {"files": paths of safetensors files}, {"checkpoint": true}, or the fields names, dtype_names and
                shapes in vLLM's format for a broadcast.
            checksum: whether the end of this update reports the checksums of all weights.
        """
        self._sums |= checksum
        return self._transfer.write(info)

    def finish_update(self, version: str | None = None, keep_kv: bool = False) -> "Finished | Future[OperationResult]":
        """End the open update: run rounds with the new weights, or draft with the new head.

        Args:
            version: name of the new weights.
            keep_kv: whether requests continue with keys and values of the old weights, and prefixes stay cached.

        Raises:
            WrongOrder: no update is open.
            WeightsRefused: an abandoned update or a sleep has left tensors without values, and this update has not
                written all of them.
        """
        if (writing := self._transfer.finish_head()) is not None:
            return writing
        count = self._update.finish()
        self._outputs += self.inner.renew(keep_kv)
        self._version = version
        sums, self._sums = self.weight_checksums() if self._sums else None, False
        return Finished(count, checksums=sums)

    def num_written(self) -> Finished:
        """Return the number of tensors that the open update has written so far.

        Raises:
            WrongOrder: no update is open, or tensors are still arriving.
        """
        return self._transfer.num_written()

    def abandon_update(self) -> None:
        """End the open update before it is finished.

        With a journal the old weights are restored. Without a journal the engine has no valid weights until a further
        update is finished.

        Raises:
            WrongOrder: no update is open.
        """
        self._transfer.check_settled()
        self._transfer.opened()
        self._transfer.end()

    def lose_weights(self) -> None:
        """Serve nothing until an update has written all weights; called if this engine's weights are older than the
        weights of other engines.
        """
        self._transfer.end()
        self._update.lose()

    def scramble_weights(self) -> None:
        """Overwrite all weights with noise, and serve nothing until an update has written all of them.

        Raises:
            WrongOrder: an update is open, or a sleep has freed the memory of the weights.
        """
        self._check_awake()
        self._transfer.check_closed()
        self._outputs += self.inner.settle()
        self._update.weights.scramble()
        self._update.lose()

    def weight_version(self, version: str | None = None) -> str | None:
        """Set the name of the weights to `version` unless it is None; return the name."""
        self._version = version or self._version
        return self._version

    def weight_checksums(self) -> dict[str, str]:
        """See `ServedWeights.checksums`.

        Raises:
            WrongOrder: an update is open or was not finished.
        """
        self._check_awake()
        if self._update.is_open or self._update.torn:
            raise WrongOrder("the weights are being updated")
        return self._update.weights.checksums()

    def _check_awake(self) -> None:
        """Raise WrongOrder while the memory of the weights is freed."""
        if WEIGHTS in self._asleep:
            raise WrongOrder("the engine sleeps without its weights: wake it up with tags=weights first")
