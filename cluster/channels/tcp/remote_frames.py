"""Packs the used part of a round's buffers into the body of a frame, and unpacks the body at the other end.

Both ends have the same buffers as every other kind of channel, at fixed addresses. Fields of a few bytes per slot are
sent whole, as raw bytes. Of a large field, such as hidden states or prompt chunks, only the part that the round uses is
sent; the counts in the round's header determine this part. The token history and the block tables, which have a wide
row for each slot, are sent as differences: new tokens of the history, which only grows within an epoch, and changed
entries of the block tables.
"""

import numpy as np
import torch
from torch import Tensor

from wingbeat.cluster.channels.memory import ALIGNMENT_BYTES, ChannelMemory, buffer_bytes
from wingbeat.cluster.channels.tcp.remote_connection import FrameError
from wingbeat.runtime.protocol.messages import REPLY_WORDS, ChannelSpec, Outcome, ReplyHeader, RoundHeader

_RULES = ("sampling_rules", "biased_token_ids", "biases")
_INPUTS = ("chunk_axes", "chunk_shown", "chunk_embeddings")
_LARGE = ("decode_taps", "block_tables", "chunk_next_token_ids", "chunk_taps", "allowed_tokens", *_RULES, *_INPUTS)
"""Fields of an outcome that are not sent whole. All other fields together have 44 bytes and one path of tokens per
slot.
"""
_TREES = ("token_ids", "parents", "depths", "scores")
_TREE_ROWS = ("epochs", "committed_lens", "num_valid")
_EXTENT_BYTES = 24


def most_bytes(spec: ChannelSpec) -> int:
    """Upper bound in bytes of the length of a body, in both directions."""
    return buffer_bytes(spec) + 2 * _EXTENT_BYTES * (spec.num_slots + 1)


class _Body:
    """Bytes of a body, written or read sequentially from the start."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.end = 0

    def put(self, values: np.ndarray) -> None:
        """Append the bytes of a contiguous array."""
        begin, self.end = self.end, self.end + values.nbytes
        self._data[begin : self.end] = values.reshape(-1).view(np.uint8)

    def take(self, into: np.ndarray) -> np.ndarray:
        """Fill a contiguous array with the next bytes and return it. Raises FrameError if too few bytes are left."""
        begin, self.end = self.end, self.end + into.nbytes
        if self.end > len(self._data):
            raise FrameError(f"a body ends after {len(self._data)} bytes, {self.end} were due")
        into.reshape(-1).view(np.uint8)[:] = self._data[begin : self.end]
        return into

    def numbers(self, count: int) -> np.ndarray:
        """The next `count` int64 numbers."""
        return self.take(np.empty(count, dtype=np.int64))

    def finish(self) -> None:
        """Raise FrameError if bytes are left."""
        if self.end != len(self._data):
            raise FrameError(f"a body has {len(self._data)} bytes, {self.end} were due")


class _Round:
    """An outcome's buffers, and how far each of them is used."""

    def __init__(self, outcome: Outcome, spec: ChannelSpec) -> None:
        self.fields = _bytes_of(outcome._asdict())
        self.small = _runs([field for name, field in outcome._asdict().items() if name not in _LARGE])
        """Raw bytes of the fields that are sent whole, beginning with the header."""
        self._spec = spec
        self._steps = np.arange(spec.max_path)
        self.num_decodes = self.num_chunk_tokens = self.num_told = self.num_masks = 0
        self.slots = np.empty(0, dtype=np.int64)
        """Slots of decodes, chunks and proposals."""
        self.ruled = self.slots
        """Slots whose sampling rules are sent."""

    def count(self) -> None:
        """Read from the small fields how many entries of each buffer are used. Raises FrameError if a count exceeds its
        buffer.
        """
        fields, spec = self.fields, self._spec
        header = RoundHeader(*fields["header"][: len(RoundHeader._fields)].tolist())
        for count in (header.num_decodes, header.num_chunks, header.num_proposals):
            _within("rows", count, spec.num_slots)
        self.num_decodes = header.num_decodes
        self.num_masks = header.num_proposals if header.has_masks else 0
        parts = [fields["decode_slots"][: header.num_decodes], fields["proposal_slots"][: header.num_proposals]]
        self.ruled = parts[1] if header.sampling_rules else parts[1][:0]
        self.num_chunk_tokens = 0
        if header.num_chunks:
            lens = fields["chunk_lens"][: header.num_chunks].tolist()
            self.num_chunk_tokens = sum(lens)
            if min(lens) < 0 or self.num_chunk_tokens > spec.max_prefill_tokens:
                raise FrameError(f"chunks of {lens} tokens, {spec.max_prefill_tokens} fit")
            parts.append(fields["chunk_slots"][: header.num_chunks])
        self.num_told = self.num_chunk_tokens if header.has_inputs else 0
        self.slots = np.concatenate(parts)
        _check_slots(self.slots, spec.num_slots)

    def computed(self) -> np.ndarray:
        """Mask of the decodes' positions that have hidden states, bool [num_decodes, max_path]."""
        return self._steps < self.fields["decode_num_tokens"][: self.num_decodes, None]


class OutcomeSender:
    """The verifier's side of one connection; keeps track of the entries that the drafter's tables have."""

    def __init__(self, memory: ChannelMemory) -> None:
        spec = memory.spec
        self._rounds = [_Round(outcome, spec) for outcome in memory.outcomes]
        self._history = memory.token_ids.numpy()
        self._epochs = np.full(spec.num_slots, -1, dtype=np.int64)
        self._lens = np.zeros(spec.num_slots, dtype=np.int64)
        self._tables = [np.zeros((spec.num_slots, spec.max_blocks_per_seq), dtype=np.int64) for _ in range(2)]

    def pack(self, round_number: int, into: np.ndarray) -> int:
        """Pack a filled round. Returns the size of the body in bytes."""
        this, body = self._rounds[round_number % 2], _Body(into)
        this.count()
        for run in this.small:
            body.put(run)
        busy = np.array(sorted(set(this.slots.tolist())), dtype=np.int64)
        fields = this.fields
        _put_extents(body, fields["block_tables"], self._changed_blocks(round_number % 2, fields, busy))
        _put_extents(body, self._history, self._new_tokens(fields, busy))
        if this.num_decodes:
            body.put(fields["decode_taps"][: this.num_decodes][this.computed()])
        if this.num_chunk_tokens:
            body.put(fields["chunk_next_token_ids"][: this.num_chunk_tokens])
            body.put(fields["chunk_taps"][: this.num_chunk_tokens])
        for name in _INPUTS if this.num_told else ():
            body.put(fields[name][: this.num_told])
        if this.num_masks:
            body.put(fields["allowed_tokens"][: this.num_masks])
        if len(this.ruled):
            for name in _RULES:
                body.put(fields[name][this.ruled])
        return body.end

    def _changed_blocks(self, parity: int, fields: dict[str, np.ndarray], busy: np.ndarray) -> np.ndarray:
        """For each changed row, the range of entries that the drafter's buffer of this parity lacks.

        The range reaches from the first to the last of these entries.
        """
        now, there = fields["block_tables"][busy], self._tables[parity]
        differs = now != there[busy]
        if not differs.any():
            return _NOTHING
        there[busy] = now
        first, last = differs.argmax(axis=1), differs.shape[1] - differs[:, ::-1].argmax(axis=1)
        return np.stack([busy, first, last - first])[:, differs.any(axis=1)]

    def _new_tokens(self, fields: dict[str, np.ndarray], busy: np.ndarray) -> np.ndarray:
        epochs = fields["epochs"][busy]
        lens = fields["committed_lens"][busy].clip(0, self._history.shape[1])
        starts = np.where(self._epochs[busy] == epochs, np.minimum(self._lens[busy], lens), 0)
        self._epochs[busy], self._lens[busy] = epochs, lens
        return np.stack([busy, starts, lens - starts])


class OutcomeReceiver:
    """The drafter's side of one connection."""

    def __init__(self, memory: ChannelMemory) -> None:
        self._rounds = [_Round(outcome, memory.spec) for outcome in memory.outcomes]
        self._history = memory.token_ids.numpy()

    def unpack(self, data: np.ndarray, expected: int | None) -> int:
        """Unpack a body into the buffers of its round. Returns the round's number.

        Args:
            expected: number of the round that is due; None accepts any number, for the first round.

        Raises:
            FrameError: the body belongs to another round, or its shape does not fit the channel.
        """
        round_number = int(_Body(data).numbers(1)[0])
        if round_number < 1 or expected not in (None, round_number):
            raise FrameError(f"round {round_number} came where {expected} was due")
        this, body = self._rounds[round_number % 2], _Body(data)
        for run in this.small:
            body.take(run)
        this.count()
        fields = this.fields
        _take_extents(body, fields["block_tables"])
        _take_extents(body, self._history)
        if this.num_decodes:
            computed, taps = this.computed(), fields["decode_taps"][: this.num_decodes]
            taps[computed] = body.take(np.empty((int(computed.sum()), taps.shape[2]), dtype=np.uint8))
        if this.num_chunk_tokens:
            body.take(fields["chunk_next_token_ids"][: this.num_chunk_tokens])
            body.take(fields["chunk_taps"][: this.num_chunk_tokens])
        for name in _INPUTS if this.num_told else ():
            body.take(fields[name][: this.num_told])
        if this.num_masks:
            body.take(fields["allowed_tokens"][: this.num_masks])
        if len(this.ruled):
            for name in _RULES:
                rows = fields[name]
                rows[this.ruled] = body.take(np.empty((len(this.ruled), rows.shape[1]), dtype=rows.dtype))
        body.finish()
        return round_number


class ReplyFrames:
    """Packs and unpacks replies. A body contains the drafted trees of the reply's slots, each as wide as the widest
    tree of the reply.
    """

    def __init__(self, memory: ChannelMemory) -> None:
        self._spec = memory.spec
        self._replies = [_bytes_of(reply._asdict()) for reply in memory.replies]
        self._outcomes = [_bytes_of(outcome._asdict()) for outcome in memory.outcomes]

    def pack(self, round_number: int, into: np.ndarray) -> int:
        """Pack the reply to a round. Returns the size of the body in bytes."""
        reply, outcome, body = self._replies[round_number % 2], self._outcomes[round_number % 2], _Body(into)
        header = RoundHeader(*outcome["header"][: len(RoundHeader._fields)].tolist())
        slots = outcome["proposal_slots"][: header.num_proposals]
        width = int(reply["num_valid"][slots].clip(1, self._spec.num_nodes).max(initial=1))
        body.put(reply["header"])
        body.put(np.array([len(slots), width]))
        body.put(slots)
        for name in _TREE_ROWS:
            body.put(reply[name][slots])
        for name in _TREES:
            body.put(reply[name][slots, :width])
        return body.end

    def unpack(self, data: np.ndarray, expected: range, incarnation: int) -> int:
        """Unpack a body into the buffers of its round. Returns the round's number.

        Args:
            expected: numbers of the rounds that the reply may answer.

        Raises:
            FrameError: the reply comes from another incarnation or answers another round, or its shape does not fit the
                channel.
        """
        body = _Body(data)
        header = body.numbers(REPLY_WORDS)
        said = ReplyHeader.read(header)
        if said.round_number not in expected or said.incarnation != incarnation:
            raise FrameError(f"an answer {tuple(said)} came where incarnation {incarnation} owed {expected}")
        reply = self._replies[said.round_number % 2]
        count, width = body.numbers(2).tolist()
        _within("trees", count, self._spec.num_slots)
        _within("nodes", width, self._spec.num_nodes)
        slots = body.numbers(count)
        _check_slots(slots, self._spec.num_slots)
        reply["header"][:] = header
        for name in _TREE_ROWS:
            reply[name][slots] = body.take(np.empty(count, dtype=reply[name].dtype))
        for name in _TREES:
            reply[name][slots, :width] = body.take(np.empty((count, width), dtype=reply[name].dtype))
        body.finish()
        return said.round_number


def _put_extents(body: _Body, table: np.ndarray, extents: np.ndarray) -> None:
    """Append parts of a table int64 [num_slots, n] to a body.

    Args:
        extents: int64 [3, count]: slots, first entries and lengths. The extents are written before the entries.
    """
    body.put(np.array([extents.shape[1]]))
    if extents.size:
        body.put(np.ascontiguousarray(extents))
        body.put(table[_cells(extents)])


def _take_extents(body: _Body, table: np.ndarray) -> None:
    (count,) = body.numbers(1).tolist()
    _within("rows", count, len(table))
    if not count:
        return
    extents = body.numbers(3 * count).reshape(3, count)
    slots, starts, lens = extents
    _check_slots(slots, len(table))
    width = table.shape[1]
    if ((starts < 0) | (starts > width) | (lens < 0) | (lens > width - starts)).any():
        raise FrameError("a part of a table lies outside of it")
    table[_cells(extents)] = body.numbers(int(lens.sum()))


def _cells(extents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of every entry of the extents, concatenated."""
    slots, starts, lens = extents
    ends = lens.cumsum()
    columns = np.arange(int(ends[-1])) + np.repeat(starts - ends + lens, lens)
    return np.repeat(slots, lens), columns


def _check_slots(slots: np.ndarray, num_slots: int) -> None:
    if slots.size and (slots.min() < 0 or slots.max() >= num_slots):
        raise FrameError(f"a slot lies outside of 0..{num_slots - 1}")


def _within(name: str, count: int, most: int) -> None:
    if not 0 <= count <= most:
        raise FrameError(f"{count} {name}, at most {most} fit")


def _bytes_of(message: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Arrays over the memory of a message's fields.

    Hidden states and embeddings become raw bytes, because NumPy may lack their dtype.
    """
    by_bytes = ("_taps", "_embeddings")
    return {name: _raw(field) if name.endswith(by_bytes) else field.numpy() for name, field in message.items()}


def _raw(rows: Tensor) -> np.ndarray:
    """Rows as raw bytes, uint8 [..., bytes]."""
    size = rows.shape[-1] * rows.dtype.itemsize
    if not rows.numel():
        return np.empty((*rows.shape[:-1], size), dtype=np.uint8)
    return rows.view(torch.uint8).numpy()


def _runs(fields: list[Tensor]) -> list[np.ndarray]:
    """Raw bytes, uint8, of fields in one region. Adjacent fields become one array, with the gaps between them."""
    storage = fields[0].untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    bounds: list[list[int]] = []
    for field in fields:
        begin = field.data_ptr() - storage.data_ptr()
        if bounds and begin - bounds[-1][1] < ALIGNMENT_BYTES:
            bounds[-1][1] = begin + field.nbytes
        else:
            bounds.append([begin, begin + field.nbytes])
    return [raw[begin:end] for begin, end in bounds]


_NOTHING = np.empty((3, 0), dtype=np.int64)
