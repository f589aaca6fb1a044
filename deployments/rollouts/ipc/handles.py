"""IPC handles of weights as JSON, for a trainer and an engine that are two processes on one GPU.

Nothing is copied between the processes: the engine maps the trainer's memory, copies the tensors into its own weights,
and unmaps the memory before the call returns. The trainer must not change or free the tensors until then.
"""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from wingbeat.cluster.channels.cuda.cuda_runtime import HANDLE_BYTES, CudaRuntime
from wingbeat.cluster.channels.cuda.lent_memory import SYNCHRONISED_S
from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.rollouts.served_weights import WeightsRefused, shown

FIELD = "ipc_handles"
"""Field of `update_info` that holds the handles."""
_Size = Annotated[int, Field(ge=0)]


def _handle_bytes(value: Any) -> bytes:
    try:
        handle = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError("must be base64") from None
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"has {len(handle)} bytes, expected {HANDLE_BYTES}")
    return handle


class SharedTensor(BaseModel):
    """A tensor in a trainer's GPU memory, as one entry of `update_info.ipc_handles`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    shape: list[_Size]
    stride: list[_Size]
    """Strides in elements."""
    offset: _Size
    """Bytes from the begin of the allocation to the tensor's first element."""
    device: str
    """UUID of the GPU."""
    handle: Annotated[bytes, BeforeValidator(_handle_bytes)]
    """IPC handle of the allocation that holds the tensor."""
    size: Annotated[int, Field(gt=0)]
    """Bytes of the allocation."""

    @property
    def end(self) -> int:
        """Number of bytes from the allocation's begin to the end of the tensor's last element."""
        farthest = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.offset + (0 if 0 in self.shape else (farthest + 1) * self.torch_dtype.itemsize)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return getattr(torch, self.dtype)

    def problem(self, device: str) -> str | None:
        """Return the field that is wrong, and why; None if all fields fit together.

        Args:
            device: UUID of the engine's GPU.
        """
        if self.device != device:
            return f"device is {self.device}: the engine is on {device}"
        if len(self.stride) != len(self.shape):
            return f"stride has {len(self.stride)} numbers: shape has {len(self.shape)}"
        if self.offset % self.torch_dtype.itemsize:
            return (
                f"offset is {self.offset}: must be a multiple of {self.torch_dtype.itemsize}, the size of {self.dtype}"
            )
        return f"size is {self.size}: the tensor ends at byte {self.end}" if self.end > self.size else None


def ipc_handles(tensors: Mapping[str, Tensor], runtime: CudaRuntime | None = None) -> dict[str, Any]:
    """Return the `update_info` that sends CUDA tensors of this process to an engine on the same GPU.

    The tensors' contents must not change, and their memory must not be freed, until the call with the `update_info` has
    returned.

    Args:
        runtime: CUDA runtime; None uses torch's.

    Raises:
        ValueError: a tensor cannot be shared; the message names the tensor and the reason.
    """
    runtime = runtime or CudaRuntime()
    entries: dict[str, Any] = {}
    devices = {tensor.device for tensor in tensors.values()}
    for name, tensor in tensors.items():
        try:
            begin, size = runtime.allocation_of(tensor.device, tensor.data_ptr())
            handle = runtime.export_memory(tensor.device, begin)
            entries[name] = {
                "dtype": shown(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.data_ptr() - begin,
                "device": runtime.uuid(tensor.device),
                "handle": base64.b64encode(handle).decode(),
                "size": size,
            }
        except CudaError as error:
            raise ValueError(f"{name} cannot be shared: {error}") from None
    for device in devices:
        # The engine's streams are not ordered after this process's pending writes.
        if not runtime.drain(device, runtime.current_stream(device), SYNCHRONISED_S):
            raise ValueError(f"{device} has not finished its earlier work within {SYNCHRONISED_S:.0f} s")
    return {FIELD: entries}


@contextmanager
def opened(
    info: Mapping[str, Any],
    device: torch.device,
    check: Callable[[str, tuple[int, ...], torch.dtype], object],
    runtime: CudaRuntime | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Context manager of the tensors of an `update_info`, which is checked as a whole before any memory is mapped.

    Args:
        device: device of the engine.
        check: raises WeightsRefused if a tensor of this name, shape and dtype cannot be written.
        runtime: CUDA runtime; None uses torch's.

    Raises:
        WeightsRefused: a field is wrong, or the memory cannot be mapped; the message begins with the field.
    """
    if others := sorted(info.keys() - {FIELD}):
        raise WeightsRefused(f"update_info.{others[0]} is given with {FIELD}: leave one out")
    entries = _read(info[FIELD])
    for name, one in entries.items():
        check(name, tuple(one.shape), one.torch_dtype)
    if device.type != "cuda":
        raise WeightsRefused(f"update_info.{FIELD} cannot be opened: the engine is on the CPU")
    runtime = runtime or CudaRuntime()
    uuid = runtime.uuid(device)
    for name, one in entries.items():
        if problem := one.problem(uuid):
            raise WeightsRefused(f"{_place(name)}.{problem}")
    with ExitStack() as stack:
        mapped: dict[bytes, int] = {}
        found = {name: _mapped(name, one, device, runtime, mapped, stack) for name, one in entries.items()}
        try:
            yield found
        finally:
            found.clear()
            # Memory must not be unmapped while the device still copies from it.
            is_copied = runtime.drain(device, runtime.current_stream(device), SYNCHRONISED_S)
        if not is_copied:
            raise ConnectionError(f"{device} has not copied the tensors within {SYNCHRONISED_S:.0f} s")


def _read(given: Any) -> dict[str, SharedTensor]:
    if not isinstance(given, Mapping):
        raise WeightsRefused(f"update_info.{FIELD} must be an object of tensors by name")
    found: dict[str, SharedTensor] = {}
    for name, fields in given.items():
        try:
            found[name] = TypeAdapter(SharedTensor).validate_python(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = "".join(f".{part}" for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise WeightsRefused(f"{_place(name)}{field} {message[0].lower()}{message[1:]}") from None
    return found


def _mapped(
    name: str,
    shared: SharedTensor,
    device: torch.device,
    runtime: CudaRuntime,
    mapped: dict[bytes, int],
    stack: ExitStack,
) -> Tensor:
    """Return a tensor over the trainer's memory; an allocation is mapped once, and unmapped by `stack`."""
    try:
        if shared.handle not in mapped:
            address = mapped[shared.handle] = runtime.open_memory(device, shared.handle)
            stack.callback(runtime.close_memory, device, address)
        address = mapped[shared.handle]
        _, size = runtime.allocation_of(device, address)
    except CudaError as error:
        raise WeightsRefused(f"{_place(name)}.handle cannot be opened: {error}") from None
    if size != shared.size:
        raise WeightsRefused(f"{_place(name)}.size is {shared.size}: the allocation of its handle has {size} bytes")
    raw = runtime.tensor(device, address, size)
    begin = shared.offset // shared.torch_dtype.itemsize
    whole = raw[: size // shared.torch_dtype.itemsize * shared.torch_dtype.itemsize].view(shared.torch_dtype)
    return whole.as_strided(shared.shape, shared.stride, begin)


def _place(name: str) -> str:
    return f"update_info.{FIELD}.{name}"
