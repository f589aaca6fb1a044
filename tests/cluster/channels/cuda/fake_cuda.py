"""A simulated machine with GPUs: memory is a file, and a stream does its work on command."""

import ctypes
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wingbeat.cluster.channels.cuda.cuda_runtime import HANDLE_BYTES
from wingbeat.kernels.cuda_driver import CudaError

FILE_PREFIX = "wingbeat-fake-cuda-"


@dataclass
class FakeEventState:
    """State of an event on the device, shared by all processes that hold it."""

    gpu: int | None = None
    """The GPU it was made on; None where the maker is another process of the test."""
    num_records: int = 0
    num_finished: int = 0
    """Records that have finished; fewer than `num_records` while the recorder's stream has work left."""


@dataclass
class FakeMachine:
    """GPUs, and memory and events that the processes of a test (here: runtimes) share."""

    num_gpus: int = 1
    peers: frozenset[tuple[int, int]] = frozenset()
    events: dict[bytes, FakeEventState] = field(default_factory=dict)
    open_files: set[Path] = field(default_factory=set)
    num_mapped: int = 0
    num_events_held: int = 0
    num_pinned: int = 0
    busy: bool = False
    """Whether streams leave their work undone."""

    def is_clean(self) -> bool:
        """Nothing allocated, mapped, pinned or held."""
        return not self.open_files and self.num_mapped == self.num_events_held == self.num_pinned == 0


class FakeEvent:
    """A process's handle of an event."""

    may_record = True

    def __init__(self, machine: FakeMachine, handle: bytes, log: list[tuple[str, str]], gpu: int) -> None:
        self.handle, self._machine, self._log, self._gpu = handle, machine, log, gpu
        # A process that opens a handle from elsewhere sees only its own records; enough where memory is synchronous.
        self._state = machine.events.setdefault(handle, FakeEventState())
        machine.num_events_held += 1

    def __del__(self) -> None:
        self._machine.num_events_held -= 1

    @property
    def label(self) -> str:
        return self.handle.rstrip(b"\0").decode()

    def record(self, stream: object) -> None:
        if not self.may_record:
            raise CudaError("cudaEventRecord failed: invalid resource handle (cudaError 400)")
        if self._state.gpu not in (None, self._gpu):
            raise CudaError("cudaEventRecord failed: the event is of another device than the stream (cudaError 400)")
        self._state.num_records += 1
        if not self._machine.busy:
            self._state.num_finished = self._state.num_records
        self._log.append(("record", self.label))

    def wait(self, stream: object) -> None:
        self._log.append(("wait", self.label))

    def query(self) -> bool:
        self._log.append(("query", self.label))
        return self._state.num_finished == self._state.num_records

    def ipc_handle(self) -> bytes:
        return self.handle


class FakeMark:
    """An event of one process, after everything that its stream was given before."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda, self._reached = cuda, False

    def reach(self) -> bool:
        self._reached = True
        return True

    def query(self) -> bool:
        self._cuda.run()
        return self._reached


class FakeCuda:
    """`CudaRuntime` of one process on such a machine.

    Args:
        visible: GPUs of the machine that this process sees, by number; device i of the process is the i-th of them.
        fail: name of the call that raises CudaError.
    """

    def __init__(self, machine: FakeMachine | None = None, visible: tuple[int, ...] = (0,), fail: str = "") -> None:
        self.machine = machine or FakeMachine()
        self.visible = visible
        self.fail = fail
        self.log: list[tuple[str, str]] = []
        """Events of this process in order: (record, wait or query, event)."""
        self._mappings: dict[int, tuple[Path, mmap.mmap]] = {}
        """By address, as tensors have it."""
        self._stream: deque[Callable[[], bool]] = deque()
        """Steps that the stream has not done yet, in order; a step returns whether it is done."""
        self._runs = threading.Lock()
        self.stuck = False
        """Whether this process's stream leaves its work undone."""

    def count(self) -> int:
        return len(self.visible)

    def describe(self, device: torch.device) -> str:
        return f"cuda:{device.index} (fake, {self.uuid(device)})"

    def uuid(self, device: torch.device) -> str:
        return f"GPU-{self.visible[device.index]}"

    def find(self, uuid: str) -> torch.device | None:
        index = next((i for i, gpu in enumerate(self.visible) if f"GPU-{gpu}" == uuid), None)
        return None if index is None else torch.device("cuda", index)

    def can_access_peer(self, device: torch.device, peer: torch.device) -> bool:
        return (self.visible[device.index], self.visible[peer.index]) in self.machine.peers

    def shares_events(self, device: torch.device) -> bool:
        return self.fail != "shares_events"

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        self._may_fail("allocate")
        fd, name = tempfile.mkstemp(prefix=FILE_PREFIX, dir="/dev/shm")
        os.truncate(fd, num_bytes)
        os.close(fd)
        self.machine.open_files.add(Path(name))
        return self._map(Path(name))

    def free(self, device: torch.device, address: int) -> None:
        path, _ = self._mappings.pop(address)
        path.unlink()
        self.machine.open_files.remove(path)

    def allocation_of(self, device: torch.device, address: int) -> tuple[int, int]:
        self._may_fail("allocation_of")
        for begin, (_, mapping) in self._mappings.items():
            if begin <= address < begin + len(mapping):
                return begin, len(mapping)
        raise CudaError("cuMemGetAddressRange failed: no allocation (CUresult 1)")

    def export_memory(self, device: torch.device, address: int) -> bytes:
        self._may_fail("export_memory")
        return str(self._mappings[address][0]).encode().ljust(HANDLE_BYTES, b"\0")

    def open_memory(self, device: torch.device, handle: bytes) -> int:
        self._may_fail("open_memory")
        try:
            address = self._map(Path(handle.rstrip(b"\0").decode()))
        except (OSError, ValueError):
            raise CudaError("cudaIpcOpenMemHandle failed: invalid argument (cudaError 1)") from None
        self.machine.num_mapped += 1
        return address

    def close_memory(self, device: torch.device, address: int) -> None:
        del self._mappings[address]
        self.machine.num_mapped -= 1

    def tensor(self, device: torch.device, address: int, num_bytes: int) -> Tensor:
        if self.fail == "carry":  # memory that is mapped and not the other process's, as some virtual machines have it
            return torch.zeros(num_bytes, dtype=torch.uint8)
        return torch.frombuffer(self._mappings[address][1], dtype=torch.uint8)[:num_bytes]

    def create_event(self, device: torch.device) -> FakeEvent:
        self._may_fail("create_event")
        handle = str(len(self.machine.events)).encode().ljust(HANDLE_BYTES, b"\0")
        gpu = self.visible[device.index]
        self.machine.events[handle] = FakeEventState(gpu)
        event = FakeEvent(self.machine, handle, self.log, gpu)
        event.may_record = self.fail != "record"
        return event

    def open_event(self, device: torch.device, handle: bytes) -> FakeEvent:
        self._may_fail("open_event")
        return FakeEvent(self.machine, handle, self.log, self.visible[device.index])

    def map_host(self, device: torch.device, address: int, num_bytes: int) -> int:
        self._may_fail("map_host")
        self.machine.num_pinned += 1
        return address

    def unmap_host(self, device: torch.device, address: int) -> None:
        self.machine.num_pinned -= 1

    def write_value(self, device: torch.device, address: int, value: int) -> None:
        self._may_fail("write_value")
        word = ctypes.c_int64.from_address(address)

        def write() -> bool:
            word.value = value
            return True

        self.enqueue(write)

    def wait_value(self, device: torch.device, address: int, value: int) -> None:
        self._may_fail("wait_value")
        word = ctypes.c_int64.from_address(address)
        self.enqueue(lambda: word.value >= value)

    def mark(self, device: torch.device) -> "FakeMark":
        self._may_fail("mark")
        mark = FakeMark(self)
        self.enqueue(mark.reach)
        return mark

    def enqueue(self, step: Callable[[], bool]) -> None:
        """Append a step to the stream."""
        self._stream.append(step)
        self.run()

    def run(self) -> bool:
        """Run the stream as far as it comes; returns whether nothing is left."""
        with self._runs:
            while self._stream and not (self.stuck or self.machine.busy) and self._stream[0]():
                self._stream.popleft()
            return not self._stream

    def current_stream(self, device: torch.device) -> object:
        return "stream"

    def drain(self, device: torch.device, stream: object, timeout_s: float) -> bool:
        return self.run() and not self.machine.busy

    def finish(self) -> None:
        """Finish the events of the machine's streams."""
        for state in self.machine.events.values():
            state.num_finished = state.num_records

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._mappings[address] = (path, mapping)
        return address

    def _may_fail(self, call: str) -> None:
        if call == self.fail:
            raise CudaError(f"{call} failed: out of memory (cudaError 2)")
