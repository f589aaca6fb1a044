"""Memory of a channel: header words, and messages laid out over one or two regions. Contains no waits and no bells.

All kinds of channels have the same messages. A kind defines which region holds a field, and how the devices that read
and write the field are ordered.
"""

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wingbeat.cluster.channels.doorbell import PeerProcess
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TreeReply, outcome_layout, reply_layout

ALIGNMENT_BYTES = 64
HOST_FIELDS = frozenset(
    {
        "header",
        "decode_slots",
        "proposal_slots",
        "chunk_slots",
        "chunk_positions",
        "chunk_lens",
        "growth_limits",
        "acceptance_table",
        "allowed_tokens",
    }
)
"""Fields that lie in host memory if there is a device; `wingbeat.cluster.channels.cuda.cuda_ipc` gives the reasons."""
DEVICE_FIELDS = frozenset((*Outcome._fields, *TreeReply._fields)) - HOST_FIELDS
"""Fields that lie in device memory if there is a device. `token_ids` stands for both a reply's tree tokens and the
token history.
"""


class ReadyEvents(Protocol):
    """Orders the reader's device after the writer's device, for one direction of messages.

    There is one event for each parity of a message's number.

    The writer calls `record` after it has enqueued its writes and before it rings the doorbell. The reader calls
    `wait`, `follow` or `finished` after the doorbell has rung and before it enqueues its reads. None of these calls
    makes the host wait for a device.
    """

    def record(self, number: int) -> None:
        """Mark the work enqueued so far on the calling thread's current stream; later messages have larger numbers."""
        ...

    def wait(self, parity: int, writer_alive: bool) -> bool:
        """Make the calling thread's current stream wait for the mark; return False if the stream must not wait."""
        ...

    def follow(self, number: int, limit_s: float, writer: PeerProcess) -> bool:
        """Like `wait`, but the stream continues without the mark if the writer dies or its device is too slow.

        Not supported by default.

        Args:
            limit_s: seconds for the writer's device, counted from the end of the work that it waits for.
        """
        return False

    def finished(self, parity: int) -> bool:
        """Whether the writer's device has reached the mark."""
        ...


@dataclass(frozen=True)
class ChannelMemory:
    """Memory that both ends share: header words, messages of two parities, and the token history."""

    spec: ChannelSpec
    words: memoryview
    """Format "q", NUM_WORDS long."""
    outcomes: tuple[Outcome, Outcome]
    replies: tuple[TreeReply, TreeReply]
    token_ids: Tensor
    """int64 [num_slots, max_model_len + 1]"""
    outcome_ready: ReadyEvents | None = None
    """Events of outcomes; None if outcomes are in host memory, where doorbell and memory fence suffice."""
    reply_ready: ReadyEvents | None = None
    """Events of replies; None if replies are in host memory."""


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Region(NamedTuple):
    """A piece of memory and the fields that it holds one after another, each aligned."""

    raw: Tensor
    """uint8 [buffer_bytes(spec, fields)], aligned to 64 bytes"""
    fields: frozenset[str] | None = None
    """Names of the fields in this region, message fields and the token history; None for all fields."""


def channel_layouts(spec: ChannelSpec) -> list[Layout]:
    """Shape and dtype of every field of the two outcomes, the two replies and the token history."""
    history: Layout = {"token_ids": ((spec.num_slots, spec.max_model_len + 1), torch.int64)}
    return [outcome_layout(spec), outcome_layout(spec), reply_layout(spec), reply_layout(spec), history]


def buffer_bytes(spec: ChannelSpec, fields: frozenset[str] | None = None) -> int:
    """Bytes of a region that holds these fields of a channel; None for all."""
    return sum(_bytes_of(_part(layout, fields)) for layout in channel_layouts(spec))


def check_fits(spec: ChannelSpec, free_bytes: int, place: str = "/dev/shm") -> None:
    """Refuse a channel that does not fit into free memory, before it is allocated.

    Args:
        place: where the memory is allocated, as named in the error message.

    Raises:
        ChannelError: the channel does not fit; the message names the setting to lower and the memory that the channel
            requires, and gives a max_num_seqs that fits, if there is one.
    """
    need = buffer_bytes(spec)
    if need <= free_bytes:
        return
    fixed = buffer_bytes(dataclasses.replace(spec, num_slots=0))
    per_slot = (need - fixed) / spec.num_slots
    fitting = int((free_bytes - fixed) // per_slot)
    amounts = f"the channel takes {need / 2**20:.0f} MiB of {place}, {free_bytes / 2**20:.0f} MiB are free"
    if fitting >= 1:
        raise ChannelError(f"max_num_seqs is {spec.num_slots}: {amounts}; {fitting} fit")
    raise ChannelError(
        f"max_num_batched_tokens is {spec.max_prefill_tokens} and max_model_len is {spec.max_model_len}: {amounts}; "
        "lower them" + (", or enlarge /dev/shm (--shm-size of a container)" if place == "/dev/shm" else "")
    )


def carve(
    spec: ChannelSpec,
    words: memoryview,
    *regions: Region,
    outcome_ready: ReadyEvents | None = None,
    reply_ready: ReadyEvents | None = None,
) -> ChannelMemory:
    """Create the channel's tensors over its regions. A region holds its fields in the order of `channel_layouts`."""
    layouts = channel_layouts(spec)
    parts: list[dict[str, Tensor]] = [{} for _ in layouts]
    for region in regions:
        start = 0
        for part, layout in zip(parts, layouts, strict=True):
            held = _part(layout, region.fields)
            part.update(_views(held, region.raw, start))
            start += _bytes_of(held)
    outcomes = (Outcome(**parts[0]), Outcome(**parts[1]))
    replies = (TreeReply(**parts[2]), TreeReply(**parts[3]))
    return ChannelMemory(spec, words, outcomes, replies, parts[4]["token_ids"], outcome_ready, reply_ready)


def _part(layout: Layout, fields: frozenset[str] | None) -> Layout:
    return layout if fields is None else {name: entry for name, entry in layout.items() if name in fields}


def _field_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes_of(layout: Layout) -> int:
    return sum(_field_bytes(shape, dtype) for shape, dtype in layout.values())


def _views(layout: Layout, raw: Tensor, start: int) -> dict[str, Tensor]:
    views = {}
    for name, (shape, dtype) in layout.items():
        views[name] = raw[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _field_bytes(shape, dtype)
    return views
