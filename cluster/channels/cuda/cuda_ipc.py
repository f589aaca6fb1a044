"""The channel over CUDA IPC: two processes of one node with a GPU each, messages in the verifier's GPU memory.

A segment of POSIX shared memory holds the control data: counters, incarnations, and the IPC handles that a drafter
opens. One block of the verifier's device holds the tensors that devices read. The block is exported once, when the
channel is created; a drafter opens it on the same GPU, or on another GPU that can access the verifier's.

The location of a field follows from its writer and its reader:

| fields of an outcome | written by | read by the drafter's | location |
|---|---|---|---|
| header (counts, round) | host | host | host memory |
| decode_slots, proposal_slots | host, from its plan | host: rows of the pass, offsets | host memory |
| chunk_slots, chunk_positions, chunk_lens | host, from its plan | host: shapes of the pass | host memory |
| growth_limits, acceptance_table | host | host: when to stop | host memory |
| allowed_tokens | host, by grammars | host: which tokens may follow a root | host memory |
| decode_positions, decode_num_tokens, decode_token_ids | device, by acceptance | device | GPU memory |
| decode_taps, chunk_taps | device, by the forward pass | device | GPU memory |
| chunk_next_token_ids | device: a prompt's last one is sampled there | device | GPU memory |
| chunk_axes, chunk_shown, chunk_embeddings | host; the last by the encoder | device | GPU memory |
| epochs, committed_lens, block_tables, last_token_ids | device, from its slot state | device | GPU memory |
| position_deltas | device, from its slot state | device | GPU memory |
| temperatures, seeds, sampling_rules, biased_token_ids, biases | device, from its slot state | device | GPU memory |
| token_ids, the history | device | device | GPU memory |

The header of a reply (round, incarnation) goes from host to host, its other fields from device to device.

So a host reads nothing that a device computes, and a host may be one round behind or ahead of its device. The slots in
host memory are a few hundred bytes; if a device needs these slots, its host uploads them with the inputs of its pass.

Two events per direction, one per parity, order the devices (`memory.ReadyEvents`). Each side creates the events that it
records on its own GPU, because an event can only be recorded by streams of its own device. A drafter writes the handles
of its two events into the header's words before it becomes visible as attached. The verifier's stream waits for a
reply by the word of `reply_word`, if both devices support it; else its host queries the reply's event.

In some virtual machines CUDA reports success although data do not arrive in the other process. Therefore each new
drafter is tested. The block ends with a pattern that the verifier has written. The drafter checks this pattern, writes
an answer after the pattern, and records both of its own events. The verifier reads the answer once these events are
finished.
"""

import logging
import os
import time
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda.cuda_events import PAIR, DeviceEvents, DrafterEvents, new_events, open_events
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.cuda.reply_word import ReplyWaits, ReplyWord, if_supported
from wingbeat.cluster.channels.doorbell import Bell, Doorbell, PeerProcess, poll
from wingbeat.cluster.channels.header import PID_BITS, ROUND_BITS, ChannelError, Word
from wingbeat.cluster.channels.memory import DEVICE_FIELDS, HOST_FIELDS, ChannelMemory, Region, buffer_bytes, carve
from wingbeat.cluster.channels.segment import Details, Segment, SegmentHeader
from wingbeat.cluster.channels.segment_files import close_segment
from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.protocol.messages import ChannelSpec

logger = logging.getLogger(__name__)
KIND = "cuda_ipc"
DRAIN_TIMEOUT_S = 5.0
"""Seconds after which a device that still uses the memory counts as hanging."""
DETACH_TIMEOUT_S = 2.0
"""Seconds that the verifier waits for the drafter to detach, which a live drafter does within one pass."""
TRIAL_TIMEOUT_S = 10.0
"""Seconds for a device to finish an event that waits for no earlier work."""
PATTERN_BYTES = 64
"""Size of the verifier's pattern at the end of the device block, and of the drafter's answer after the pattern."""


@dataclass(frozen=True)
class _Mapping:
    """A process's mapping of a channel's device block, and its events."""

    runtime: CudaRuntime
    device: torch.device
    address: int
    outcome_ready: DeviceEvents
    reply_ready: DeviceEvents

    def memory(self, segment: Segment) -> ChannelMemory:
        """The channel's tensors in the segment's body and the device block."""
        spec = segment.header.spec
        raw = self.runtime.tensor(self.device, self.address, buffer_bytes(spec, DEVICE_FIELDS))
        regions = (Region(segment.body, HOST_FIELDS), Region(raw, DEVICE_FIELDS))
        return carve(spec, segment.words, *regions, outcome_ready=self.outcome_ready, reply_ready=self.reply_ready)

    def patterns(self, spec: ChannelSpec) -> tuple[Tensor, Tensor]:
        """The verifier's pattern and the drafter's answer on the device, uint8 [PATTERN_BYTES] each."""
        start = buffer_bytes(spec, DEVICE_FIELDS)
        raw = self.runtime.tensor(self.device, self.address, start + 2 * PATTERN_BYTES)
        return raw[start : start + PATTERN_BYTES], raw[start + PATTERN_BYTES :]

    def drain(self) -> bool:
        """Wait for this process's device to finish with the block; False after `DRAIN_TIMEOUT_S`."""
        streams = [events.last_stream for events in (self.outcome_ready, self.reply_ready)]
        # Both events may have been used on the same stream. If so, the second wait returns at once.
        return all(s is None or self.runtime.drain(self.device, s, DRAIN_TIMEOUT_S) for s in streams)

    def release_events(self) -> None:
        """Release this process's handles of all four events."""
        self.outcome_ready.release()
        self.reply_ready.release()


class CudaIpcChannel:
    """A channel and its verifier's end.

    The device block is freed by `close`, on deletion, or at the end of the process.
    """

    def __init__(self, name: str, segment: Segment, mapping: _Mapping) -> None:
        self.name = name
        runtime, device, words = mapping.runtime, mapping.device, segment.words
        waits = if_supported(lambda: ReplyWaits(runtime, device, words, mapping.outcome_ready.finished))
        self._segment, self._replies = segment, DrafterEvents(runtime, device, words, waits)
        self._tried, self._tried_until = 0, 0.0
        mapping = self._mapping = replace(mapping, reply_ready=self._replies)
        self.verifier_end = VerifierSide(mapping.memory(segment), Doorbell(Bell(segment.words, Word.REPLIED)))
        pid = os.getpid()
        # Finalizers run in reverse order of their creation, so `unlink` marks the channel as closed before `free` runs,
        # and the drafter detaches first.
        free = weakref.finalize(self.verifier_end, _free, mapping, segment.words, pid)
        free.atexit = False  # an interpreter that exits must not wait for a device that may hang
        unlink = weakref.finalize(self.verifier_end, close_segment, segment.words, segment.path, pid)

        def close() -> None:
            unlink()
            free()

        self.verifier_end.on_close = close

    def try_drafter(self, timeout_s: float = TRIAL_TIMEOUT_S, wait_s: float = TRIAL_TIMEOUT_S) -> bool:
        """Open the attached drafter's events and check the answer that it wrote into the block when it attached.

        Args:
            timeout_s: seconds for the drafter's events to finish, counted from the first call.
            wait_s: longest wait of this call in seconds.

        Returns:
            True if the answer is right; False if the events are not finished and time is left, so that the caller must
                call again.

        Raises:
            ChannelError: the drafter's events do not finish in time, or its answer does not arrive on the verifier's
                device.
        """
        details, incarnation = self._segment.header.details, self.verifier_end.incarnation
        expected, now = _answer(bytes.fromhex(details["pattern"]), incarnation), time.monotonic()
        if self._tried != incarnation:
            self._tried, self._tried_until = incarnation, now + timeout_s
        try:
            self._replies.open()
            limit_s = min(wait_s, self._tried_until - now)
            marked = poll(lambda: all(self._replies.finished(parity) for parity in PAIR), limit_s)
            if not marked and time.monotonic() < self._tried_until:
                return False
            found = bytes(self._mapping.patterns(self._segment.header.spec)[1].cpu().numpy())
        except RuntimeError as error:
            reason = f"the verifier cannot open the drafter's events: {_one_line(error)}"
            raise ChannelError(f"channel {self.name!r}: {reason}") from error
        if not marked or found != expected:
            what = "data do not arrive on" if marked else "events do not finish on"
            raise ChannelError(f"channel {self.name!r}: the drafter's {what} the verifier's {details['device']}")
        return True

    @classmethod
    def create(
        cls, name: str, spec: ChannelSpec, device: torch.device, runtime: CudaRuntime | None = None
    ) -> "CudaIpcChannel":
        """Create the channel `name` on the verifier's device, after removing segments of dead verifiers.

        Raises ChannelError if `device` is not a CUDA device with an index or shares no events, if the device block
        cannot be allocated or exported, if the name is not a plain file name or belongs to a live verifier, or if
        /dev/shm is too full.
        """
        try:
            runtime = runtime or CudaRuntime()
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
        """Attach to the channel `name` as its drafter, which runs on `device`. Any earlier incarnation is detached.

        `close` waits for the device, unmaps the block and destroys this process's events.

        Raises ChannelError if the channel does not exist, was created by another version or is of another kind, if
        `device` cannot reach the verifier's device or does not read the verifier's pattern there, if the verifier is
        gone, or if `incarnation` is not larger than the attached drafter's.
        """
        segment = Segment.attach(name, KIND, host_bytes)
        if not PeerProcess(segment.words[Word.VERIFIER_PID], segment.words[Word.VERIFIER_START]).works():
            # The owner is checked before the handles are opened, because CUDA's message would not say that the
            # exporting process is dead.
            raise ChannelError(f"channel {name!r}: its verifier has closed it or is gone")
        details = segment.header.details
        try:
            runtime = runtime or CudaRuntime()
            _check_device(runtime, device, "drafter")
            check_reach(runtime, device, details["uuid"], details["device"])
            mapping, handles = _open(segment, incarnation, device, runtime)
        except ChannelError:
            raise
        except RuntimeError as error:
            reason = f"the drafter's {device} cannot open the verifier's {details['device']}: {_one_line(error)}"
            raise ChannelError(f"channel {name!r}: {reason}") from error
        try:
            end = DrafterSide(mapping.memory(segment), incarnation, handles)
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
    """Refuse a drafter's device that cannot access memory of the verifier's GPU.

    If both devices are the same GPU, access is always possible.

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
    if not runtime.shares_events(device):
        raise ChannelError(
            f"channel 'cuda_ipc': the {side}'s {runtime.describe(device)} shares no events between processes "
            "(cudaDevAttrIpcEventSupport is 0), as under WSL2 and in some virtual machines; use channel 'shm'"
        )


def _export(spec: ChannelSpec, device: torch.device, runtime: CudaRuntime) -> tuple[_Mapping, Details]:
    """Create a new channel's device block and outcome events, and the details with which a drafter opens both."""
    address = runtime.allocate(device, buffer_bytes(spec, DEVICE_FIELDS) + 2 * PATTERN_BYTES)
    try:
        made, handles = new_events(runtime, device)
        pattern = os.urandom(PATTERN_BYTES)
        details: Details = {
            "uuid": runtime.uuid(device),
            "device": runtime.describe(device),
            "memory": runtime.export_memory(device, address).hex(),
            "outcome_ready": handles.hex(),
            "pattern": pattern.hex(),
        }
        events = DeviceEvents(runtime, device, made)
        mapping = _Mapping(runtime, device, address, events, DeviceEvents(runtime, device, []))
        mapping.patterns(spec)[0].copy_(_bytes(pattern))
        if not runtime.drain(device, runtime.current_stream(device), DRAIN_TIMEOUT_S):
            raise CudaError(f"{device} has not written {PATTERN_BYTES} bytes within {DRAIN_TIMEOUT_S:.0f} s")
    except BaseException:
        runtime.free(device, address)
        raise
    return mapping, details


def _open(segment: Segment, incarnation: int, device: torch.device, runtime: CudaRuntime) -> tuple[_Mapping, bytes]:
    """Open the verifier's block in the drafter, and create the reply events.

    Returns the mapping and the handles of the reply events.

    Checks the verifier's pattern, writes the answer and records both reply events.
    """
    details, first, word = segment.header.details, incarnation << ROUND_BITS, None
    address = runtime.open_memory(device, bytes.fromhex(details["memory"]))
    try:
        outcome_ready = DeviceEvents(
            runtime, device, open_events(runtime, device, bytes.fromhex(details["outcome_ready"]))
        )
        made, handles = new_events(runtime, device)
        word = if_supported(lambda: ReplyWord(runtime, device, segment.words, first))
        mapping = _Mapping(runtime, device, address, outcome_ready, DeviceEvents(runtime, device, made, word))
        theirs, mine = mapping.patterns(segment.header.spec)
        pattern = bytes.fromhex(details["pattern"])
        if bytes(theirs.cpu().numpy()) != pattern:
            raise CudaError("data written by the verifier do not arrive")
        mine.copy_(_bytes(_answer(pattern, incarnation)))
        for parity in reversed(PAIR):  # round 0 last, so that no round of this incarnation counts as completed
            mapping.reply_ready.record(first | parity)
    except BaseException:
        if word is not None:
            word.release()
        runtime.close_memory(device, address)
        raise
    return mapping, handles


def _answer(pattern: bytes, incarnation: int) -> bytes:
    """The drafter's answer to the verifier's pattern, which differs for each incarnation."""
    return incarnation.to_bytes(8, "little") + bytes(byte ^ 0xFF for byte in pattern[8:])


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unmap(mapping: _Mapping) -> bool:
    """Unmap the verifier's memory once this device is done with it.

    Returns False if the device hangs; the memory then stays mapped.
    """
    if not mapping.drain():
        logger.warning("%s hangs: the channel's memory stays mapped until this process ends", mapping.device)
        return False
    mapping.release_events()
    mapping.runtime.close_memory(mapping.device, mapping.address)
    return True


def _free(mapping: _Mapping, words: memoryview, pid: int) -> None:
    """Free the device block once the drafter has unmapped it.

    In CUDA the result of freeing memory that another process still maps is undefined.
    """
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
    """CUDA's own message, without the lines of advice that torch appends."""
    return str(error).partition("\n")[0]
