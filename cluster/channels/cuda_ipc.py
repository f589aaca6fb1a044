"""The channel over CUDA IPC: two processes of one node, each with a CUDA device, messages in the verifier's GPU memory.

Control stays in a segment of POSIX shared memory: counters, incarnations, and the handles by which a
drafter opens the rest. One block of the verifier's device holds the tensors that devices read. It is exported once,
when the channel is made; a drafter opens it on the same GPU, or on another one that can access the verifier's.

Where a field lies follows from who writes and who reads it:

| fields of an outcome | written by | read by the drafter's | lie in |
|---|---|---|---|
| header (counts, round) | host | host | host memory |
| decode_slots, proposal_slots | host, from its plan | host: rows of the pass, offsets | host memory |
| chunk_slots, chunk_positions, chunk_lens | host, from its plan | host: shapes of the pass | host memory |
| growth_limits, acceptance_table | host | host: when to stop | host memory |
| allowed_tokens | host, by grammars | host: which tokens may follow a root | host memory |
| decode_positions, decode_num_tokens, decode_token_ids | device, by acceptance | device | GPU memory |
| decode_taps, chunk_taps | device, by the forward pass | device | GPU memory |
| chunk_next_token_ids | device: a prompt's last one is sampled there | device | GPU memory |
| epochs, committed_lens, block_tables, last_token_ids | device, from its slot state | device | GPU memory |
| temperatures, seeds | device, from its slot state | device | GPU memory |
| token_ids, the history | device | device | GPU memory |

The header of a reply (round, incarnation) goes from host to host, its other fields from device to device.

So a host reads nothing that a device computes, and may run a round behind or ahead of its device. The slots in host
memory are a few hundred bytes, which a device that needs them gets in the pass's own upload.

Two events per direction, one per parity, order the devices (`memory.ReadyEvents`). The verifier makes
all four, as the owner of the memory; the drafter opens them on its own device, where it also records those of its
replies, as NVIDIA's simpleIPC sample does. So what outlives a drafter does not depend on an event that went with it.
"""

import logging
import os
import weakref
from dataclasses import dataclass

import torch

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda_runtime import CudaRuntime, IpcEvent, TorchCudaRuntime
from wingbeat.cluster.channels.doorbell import Bell, Doorbell, PeerProcess
from wingbeat.cluster.channels.header import PID_BITS, ChannelError, Word
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, HOST_FIELDS, ChannelMemory, Region, buffer_bytes, carve
from wingbeat.cluster.channels.segment import Details, Segment, SegmentHeader
from wingbeat.cluster.channels.segment_files import close_segment
from wingbeat.runtime.protocol.messages import ChannelSpec

logger = logging.getLogger(__name__)
KIND = "cuda_ipc"
DRAIN_TIMEOUT_S = 5.0
"""A device that is not done with the memory by then hangs."""
DETACH_TIMEOUT_S = 2.0
"""A drafter lets go within one of its passes, or is dead."""
PAIR = (0, 1)


class DeviceEvents:
    """`ReadyEvents` by two interprocess CUDA events.

    CUDA makes a wait for an event that was never recorded do nothing, and one for an event of an earlier round end
    early: both would let a stream read what is not there yet. And the record of a process that was killed before its
    device got there may never complete, so that a waiting stream would hang. Hence the channel looks only at events of
    a round whose doorbell rang. A verifier's stream never waits: its host asks, and looks meanwhile whether the drafter
    lives, because a drafter may be killed at any time and must cost speed alone. A drafter's stream waits, so that its
    pass is enqueued by the time the verifier's device is done; one whose verifier is gone has nobody to work for.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device, events: list[IpcEvent]) -> None:
        self._runtime = runtime
        self._device = device
        self._events = events
        self.last_stream: object | None = None
        """The last stream that recorded or waited here: the one to drain before the memory goes."""

    def record(self, parity: int) -> None:
        """Mark the calling thread's current stream of the channel's device."""
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].record(self.last_stream)

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Order the calling thread's current stream after the mark; of a dead writer only finished work is taken."""
        if not writer_alive:
            return self._events[parity].query()
        self.last_stream = self._runtime.current_stream(self._device)
        self._events[parity].wait(self.last_stream)
        return True

    def finished(self, parity: int) -> bool:
        """Whether the device of the writer has reached the mark."""
        return self._events[parity].query()

    def release(self) -> None:
        """Destroy the events, or this process's hold on them."""
        self._events.clear()
        self.last_stream = None


@dataclass(frozen=True)
class _Mapping:
    """One process's hold on the device block and the events of a channel."""

    runtime: CudaRuntime
    device: torch.device
    address: int
    outcome_ready: DeviceEvents
    reply_ready: DeviceEvents

    def memory(self, segment: Segment) -> ChannelMemory:
        """The channel's tensors over the segment's body and the device block."""
        spec = segment.header.spec
        raw = self.runtime.tensor(self.device, self.address, buffer_bytes(spec, DEVICE_FIELDS))
        regions = (Region(segment.body, HOST_FIELDS), Region(raw, DEVICE_FIELDS))
        return carve(spec, segment.words, *regions, outcome_ready=self.outcome_ready, reply_ready=self.reply_ready)

    def drain(self) -> bool:
        """Whether this process's device is done with the block, after waiting for it."""
        streams = [events.last_stream for events in (self.outcome_ready, self.reply_ready)]
        # Two waits at most, of which the second ends at once where both are the same stream.
        return all(s is None or self.runtime.drain(self.device, s, DRAIN_TIMEOUT_S) for s in streams)

    def release_events(self) -> None:
        """Destroy this process's hold on all four events."""
        self.outcome_ready.release()
        self.reply_ready.release()


class CudaIpcChannel:
    """A channel and its verifier's end, whose `close` frees the device block; so does its deletion.

    The end of the process frees it too, by the driver.
    """

    def __init__(self, name: str, segment: Segment, mapping: _Mapping) -> None:
        self.name = name
        self.verifier_end = VerifierSide(mapping.memory(segment), Doorbell(Bell(segment.words, Word.REPLIED)))
        pid = os.getpid()
        # Of a channel dropped unclosed the later finalizer runs first: the drafter must see it closed to let go.
        free = weakref.finalize(self.verifier_end, _free, mapping, segment.words, pid)
        free.atexit = False  # an interpreter that ends must not wait for a device that may hang
        unlink = weakref.finalize(self.verifier_end, close_segment, segment.words, segment.path, pid)

        def close() -> None:
            unlink()
            free()

        self.verifier_end.on_close = close

    @classmethod
    def create(
        cls, name: str, spec: ChannelSpec, device: torch.device, runtime: CudaRuntime | None = None
    ) -> "CudaIpcChannel":
        """Make the channel `name` on the verifier's device, after removing segments of dead verifiers.

        Raises ChannelError if `device` is no CUDA device with an index, the device block cannot be made or exported,
        the name is not a plain file name or belongs to a live verifier, or /dev/shm is too full.
        """
        try:
            runtime = runtime or TorchCudaRuntime()
            _check_device(runtime, device, "verifier")
            mapping, details = _export(spec, device, runtime)
        except ChannelError:
            raise
        except RuntimeError as error:
            raise ChannelError(f"channel {name!r} cannot be made on {device}: {_one_line(error)}") from error
        try:
            segment = Segment.create(name, SegmentHeader(KIND, spec, details), buffer_bytes(spec, HOST_FIELDS))
        except BaseException:
            mapping.release_events()
            runtime.free(device, mapping.address)
            raise
        return cls(name, segment, mapping)

    @staticmethod
    def attach(name: str, incarnation: int, device: torch.device, runtime: CudaRuntime | None = None) -> DrafterSide:
        """Attach to the channel `name` as its drafter on `device`; an earlier incarnation is thereby closed.

        `close` waits for the device, unmaps the block and destroys this process's events.

        Raises ChannelError if there is no such channel, it was made by another version or is of another kind, `device`
        cannot reach the verifier's, its verifier is gone, or `incarnation` is not larger than the one attached.
        """
        segment = Segment.attach(name, KIND, host_bytes)
        if not PeerProcess(segment.words[Word.VERIFIER_PID], segment.words[Word.VERIFIER_START]).alive():
            # Before its handles are tried: CUDA's own message would not say that the exporter is dead.
            raise ChannelError(f"channel {name!r}: its verifier has closed it or is gone")
        details = segment.header.details
        try:
            runtime = runtime or TorchCudaRuntime()
            _check_device(runtime, device, "drafter")
            check_reach(runtime, device, str(details["uuid"]), str(details["device"]))
            mapping = _open(details, device, runtime)
        except ChannelError:
            raise
        except RuntimeError as error:
            reason = f"the drafter's {device} cannot open the verifier's {details['device']}: {_one_line(error)}"
            raise ChannelError(f"channel {name!r}: {reason}") from error
        try:
            end = DrafterSide(mapping.memory(segment), incarnation)
        except BaseException:
            mapping.release_events()
            runtime.close_memory(device, mapping.address)
            raise
        end.on_close = weakref.finalize(end, _unmap, mapping)
        end.on_close.atexit = False
        return end


def host_bytes(spec: ChannelSpec) -> int:
    """Bytes of the segment's body."""
    return buffer_bytes(spec, HOST_FIELDS)


def check_reach(runtime: CudaRuntime, device: torch.device, verifier_uuid: str, verifier_device: str) -> None:
    """Refuse a drafter's device that cannot use memory of the verifier's; the same GPU always can.

    Raises:
        ChannelError: the verifier's GPU is hidden from this process, or no peer access exists; names both devices.
    """
    verifier = runtime.find(verifier_uuid)
    mine = runtime.describe(device)
    if verifier is None:
        raise ChannelError(
            f"the drafter's {mine} does not see the verifier's {verifier_device}: CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}, it must list both, or use channel 'shm'"
        )
    if verifier != device and not runtime.can_access_peer(device, verifier):
        raise ChannelError(
            f"the drafter's {mine} has no peer access to the verifier's {verifier_device}: put both on one GPU, or use "
            "channel 'shm'"
        )


def _check_device(runtime: CudaRuntime, device: torch.device, side: str) -> None:
    count = runtime.count()
    if device.type != "cuda" or device.index is None or device.index >= count:
        allowed = f"one of cuda:0..cuda:{count - 1}" if count else "a CUDA device, and this process sees none"
        raise ChannelError(f"channel 'cuda_ipc': the {side}'s device is {str(device)!r}, it must be {allowed}")


def _export(spec: ChannelSpec, device: torch.device, runtime: CudaRuntime) -> tuple[_Mapping, Details]:
    """The device block and events of a new channel, and what a drafter needs to open them."""
    address = runtime.allocate(device, buffer_bytes(spec, DEVICE_FIELDS))
    try:
        outcome_ready = [runtime.create_event(device) for _ in PAIR]
        reply_ready = [runtime.create_event(device) for _ in PAIR]
        details: Details = {
            "uuid": runtime.uuid(device),
            "device": runtime.describe(device),
            "memory": runtime.export_memory(device, address).hex(),
            "outcome_ready": [event.ipc_handle().hex() for event in outcome_ready],
            "reply_ready": [event.ipc_handle().hex() for event in reply_ready],
        }
    except BaseException:
        runtime.free(device, address)
        raise
    events = (DeviceEvents(runtime, device, made) for made in (outcome_ready, reply_ready))
    return _Mapping(runtime, device, address, *events), details


def _open(details: Details, device: torch.device, runtime: CudaRuntime) -> _Mapping:
    address = runtime.open_memory(device, bytes.fromhex(details["memory"]))
    try:
        events = [
            [runtime.open_event(device, bytes.fromhex(handle)) for handle in details[direction]]
            for direction in ("outcome_ready", "reply_ready")
        ]
    except BaseException:
        runtime.close_memory(device, address)
        raise
    return _Mapping(runtime, device, address, *(DeviceEvents(runtime, device, opened) for opened in events))


def _unmap(mapping: _Mapping) -> bool:
    """Let go of the verifier's memory, once this device is done with it; False where it hangs and stays mapped."""
    if not mapping.drain():
        logger.warning("%s hangs: the channel's memory stays mapped until this process ends", mapping.device)
        return False
    mapping.release_events()
    mapping.runtime.close_memory(mapping.device, mapping.address)
    return True


def _free(mapping: _Mapping, words: memoryview, pid: int) -> None:
    """Free the device block, once nobody uses it: CUDA leaves open what happens to memory freed under an importer."""
    if os.getpid() != pid:
        return
    attached = words[Word.ATTACHED]
    drafter = PeerProcess(attached & (1 << PID_BITS) - 1, words[Word.DRAFTER_START])

    def let_go() -> bool:
        return attached == 0 or words[Word.DETACHED] == attached >> PID_BITS

    def gone() -> bool:
        return not drafter.alive()

    released = Doorbell(Bell(words, Word.DETACHED)).wait(let_go, DETACH_TIMEOUT_S, gone) or gone()
    if not released or not mapping.drain():
        logger.warning("%s: the channel's memory is still in use and stays until this process ends", mapping.device)
        return
    mapping.release_events()
    mapping.runtime.free(mapping.device, mapping.address)


def _one_line(error: BaseException) -> str:
    """torch adds lines of advice to CUDA's own message."""
    return str(error).partition("\n")[0]
