"""What of a round's buffers counts, packed into the body of a frame and laid into the same places at the other end.

The buffers are those of every channel, so addresses are fixed at both ends. Of them travels what the round's header
says counts: rows of decodes, the hidden states of the positions they computed, chunks, proposals. Of the two wide
tables by slot only what the other end lacks travels: what follows in a token history, which grows within an epoch, and
entries of block tables that changed.
"""

import numpy as np
import torch
from torch import Tensor

from wingbeat.cluster.channels.memory import ChannelMemory, buffer_bytes
from wingbeat.cluster.channels.remote_connection import FrameError
from wingbeat.runtime.protocol.messages import ChannelSpec, ReplyHeader, RoundHeader

_WHOLE = ("epochs", "committed_lens", "temperatures", "seeds", "last_token_ids", "growth_limits", "acceptance_table")
"""A few bytes per slot."""
_TREES = ("token_ids", "parents", "depths", "scores")
_TREE_ROWS = ("epochs", "committed_lens", "num_valid")
_EXTENT_BYTES = 24


def most_bytes(spec: ChannelSpec) -> int:
    """Bytes of the longest body either way."""
    return buffer_bytes(spec) + 16 * 8 * (spec.num_slots + 8) + 2 * _EXTENT_BYTES * (spec.num_slots + 1)


class _Body:
    """Bytes of a body, written or read from the start."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.end = 0

    def put(self, values: np.ndarray) -> None:
        """Append the bytes of a contiguous array."""
        begin, self.end = self.end, self.end + values.nbytes
        self._data[begin : self.end] = values.reshape(-1).view(np.uint8)

    def take(self, into: np.ndarray) -> np.ndarray:
        """Fill a contiguous array with the bytes that follow; returns it. Raises FrameError where they end before."""
        begin, self.end = self.end, self.end + into.nbytes
        if self.end > len(self._data):
            raise FrameError(f"a body ends after {len(self._data)} bytes, {self.end} were due")
        into.reshape(-1).view(np.uint8)[:] = self._data[begin : self.end]
        return into

    def numbers(self, count: int) -> np.ndarray:
        """So many int64 that follow."""
        return self.take(np.empty(count, dtype=np.int64))

    def finish(self) -> None:
        """Raises FrameError where bytes are left."""
        if self.end != len(self._data):
            raise FrameError(f"a body has {len(self._data)} bytes, {self.end} were due")


class _Rows:
    """Which rows of an outcome count, by its own numbers."""

    def __init__(self, fields: dict[str, np.ndarray], spec: ChannelSpec, header: RoundHeader) -> None:
        for name, most in (("num_decodes", spec.num_slots), ("num_chunks", spec.num_slots)):
            _within(name, getattr(header, name), most)
        _within("num_proposals", header.num_proposals, spec.num_slots)
        self._fields, self._spec, self.header = fields, spec, header

    def columns(self) -> list[np.ndarray]:
        """The short columns, in the order they travel."""
        fields, header = self._fields, self.header
        decodes = ("decode_slots", "decode_positions", "decode_num_tokens", "decode_token_ids")
        chunks = ("chunk_slots", "chunk_positions", "chunk_lens")
        columns = [fields[name][: header.num_decodes] for name in decodes]
        columns += [fields[name][: header.num_chunks] for name in chunks]
        columns.append(fields["proposal_slots"][: header.num_proposals])
        return columns + [fields[name] for name in _WHOLE]

    def num_chunk_tokens(self) -> int:
        """Of all chunks; once the columns are there, as all that follows."""
        lens = self._fields["chunk_lens"][: self.header.num_chunks]
        count = int(lens.sum())
        if (lens < 0).any() or count > self._spec.max_prefill_tokens:
            raise FrameError(f"chunks of {count} tokens, {self._spec.max_prefill_tokens} fit")
        return count

    def computed(self) -> np.ndarray:
        """Positions of the decodes that have hidden states, bool [num_decodes, max_path]."""
        lens = self._fields["decode_num_tokens"][: self.header.num_decodes]
        return np.arange(self._spec.max_path) < lens[:, None]

    def busy(self) -> np.ndarray:
        """Slots that the round speaks of, whose rows by slot are read; ascending."""
        fields, header = self._fields, self.header
        seen = np.zeros(self._spec.num_slots, dtype=bool)
        parts = ("decode_slots", header.num_decodes), ("chunk_slots", header.num_chunks)
        for name, count in (*parts, ("proposal_slots", header.num_proposals)):
            slots = fields[name][:count]
            _check_slots(slots, len(seen))
            seen[slots] = True
        return np.flatnonzero(seen)


class OutcomeSender:
    """The verifier's end of one connection: knows what the drafter has of the wide tables."""

    def __init__(self, memory: ChannelMemory) -> None:
        spec = memory.spec
        self._spec = spec
        self._outcomes = [_bytes_of(outcome._asdict()) for outcome in memory.outcomes]
        self._history = memory.token_ids.numpy()
        self._epochs = np.full(spec.num_slots, -1, dtype=np.int64)
        self._lens = np.zeros(spec.num_slots, dtype=np.int64)
        self._tables = [np.zeros((spec.num_slots, spec.max_blocks_per_seq), dtype=np.int64) for _ in range(2)]

    def pack(self, round_number: int, into: np.ndarray) -> int:
        """Pack a round that has been filled; returns the body's bytes."""
        fields, body = self._outcomes[round_number % 2], _Body(into)
        rows = _Rows(fields, self._spec, RoundHeader(*fields["header"][: len(RoundHeader._fields)].tolist()))
        body.put(fields["header"])
        for column in rows.columns():
            body.put(column)
        busy, num_chunk_tokens = rows.busy(), rows.num_chunk_tokens()
        _put_extents(body, fields["block_tables"], *self._changed_blocks(round_number % 2, fields, busy))
        _put_extents(body, self._history, *self._new_tokens(fields, busy))
        body.put(fields["decode_taps"][: rows.header.num_decodes][rows.computed()])
        body.put(fields["chunk_next_token_ids"][:num_chunk_tokens])
        body.put(fields["chunk_taps"][:num_chunk_tokens])
        return body.end

    def _changed_blocks(self, parity: int, fields: dict, busy: np.ndarray) -> tuple[np.ndarray, ...]:
        """From the first to the last entry of each row that the drafter's buffer of this parity has otherwise."""
        now, there = fields["block_tables"][busy], self._tables[parity]
        differs = now != there[busy]
        there[busy] = now
        first, last = differs.argmax(axis=1), differs.shape[1] - differs[:, ::-1].argmax(axis=1)
        changed = differs.any(axis=1)
        return busy[changed], first[changed], (last - first)[changed]

    def _new_tokens(self, fields: dict, busy: np.ndarray) -> tuple[np.ndarray, ...]:
        epochs = fields["epochs"][busy]
        lens = fields["committed_lens"][busy].clip(0, self._history.shape[1])
        starts = np.where(self._epochs[busy] == epochs, np.minimum(self._lens[busy], lens), 0)
        self._epochs[busy], self._lens[busy] = epochs, lens
        return busy, starts, lens - starts


class OutcomeReceiver:
    """The drafter's end of one connection."""

    def __init__(self, memory: ChannelMemory) -> None:
        self._spec = memory.spec
        self._outcomes = [_bytes_of(outcome._asdict()) for outcome in memory.outcomes]
        self._history = memory.token_ids.numpy()

    def unpack(self, data: np.ndarray, expected: int | None) -> int:
        """Lay a body into the buffers of its round; returns the round's number.

        Args:
            expected: number of the round that is due; None takes any as the first.

        Raises:
            FrameError: it is another round, or its shape does not fit the channel's.
        """
        body = _Body(data)
        header = body.numbers(8)
        round_number = int(header[0])
        if round_number < 1 or expected not in (None, round_number):
            raise FrameError(f"round {round_number} came where {expected} was due")
        fields = self._outcomes[round_number % 2]
        fields["header"][:] = header
        rows = _Rows(fields, self._spec, RoundHeader(*header[: len(RoundHeader._fields)].tolist()))
        for column in rows.columns():
            body.take(column)
        rows.busy()  # slots index whatever the drafter keeps
        num_chunk_tokens = rows.num_chunk_tokens()
        _take_extents(body, fields["block_tables"])
        _take_extents(body, self._history)
        computed, taps = rows.computed(), fields["decode_taps"][: header[1]]
        taps[computed] = body.take(np.empty((int(computed.sum()), taps.shape[2]), dtype=np.uint8))
        body.take(fields["chunk_next_token_ids"][:num_chunk_tokens])
        body.take(fields["chunk_taps"][:num_chunk_tokens])
        body.finish()
        return round_number


class ReplyFrames:
    """Trees on their way: rows of the slots that asked for one, as wide as the widest of them."""

    def __init__(self, memory: ChannelMemory) -> None:
        self._spec = memory.spec
        self._replies = [_bytes_of(reply._asdict()) for reply in memory.replies]
        self._outcomes = [_bytes_of(outcome._asdict()) for outcome in memory.outcomes]

    def pack(self, round_number: int, into: np.ndarray) -> int:
        """Pack the answer to a round; returns the body's bytes."""
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
        """Lay a body into the buffers of its round; returns the round's number.

        Args:
            expected: rounds that may be answered next.

        Raises:
            FrameError: it is the answer of another one or to another round, or its shape does not fit the channel's.
        """
        body = _Body(data)
        header = body.numbers(8)
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


def _put_extents(body: _Body, table: np.ndarray, slots: np.ndarray, starts: np.ndarray, lens: np.ndarray) -> None:
    """Parts of a table int64 [num_slots, n]: of row slots[i], lens[i] entries from starts[i] on."""
    body.put(np.array([len(slots)]))
    for numbers in (slots, starts, lens):
        body.put(numbers)
    body.put(table[_cells(slots, starts, lens)])


def _take_extents(body: _Body, table: np.ndarray) -> None:
    (count,) = body.numbers(1).tolist()
    _within("rows", count, len(table))
    slots, starts, lens = (body.numbers(count) for _ in range(3))
    _check_slots(slots, len(table))
    width = table.shape[1]
    if ((starts < 0) | (starts > width) | (lens < 0) | (lens > width - starts)).any():
        raise FrameError("a part of a table lies outside of it")
    table[_cells(slots, starts, lens)] = body.numbers(int(lens.sum()))


def _cells(slots: np.ndarray, starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of every entry of some extents, one after the other."""
    begins = lens.cumsum() - lens
    columns = np.arange(int(lens.sum())) + np.repeat(starts - begins, lens)
    return np.repeat(slots, lens), columns


def _check_slots(slots: np.ndarray, num_slots: int) -> None:
    if ((slots < 0) | (slots >= num_slots)).any():
        raise FrameError(f"a slot lies outside of 0..{num_slots - 1}")


def _within(name: str, count: int, most: int) -> None:
    if not 0 <= count <= most:
        raise FrameError(f"{count} {name}, at most {most} fit")


def _bytes_of(message: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """A message as arrays over the same memory: hidden states, whose type NumPy may lack, by their bytes."""
    arrays = {name: field for name, field in message.items() if not name.endswith("_taps")}
    return {name: field.numpy() for name, field in arrays.items()} | {
        name: _raw(field) for name, field in message.items() if name.endswith("_taps")
    }


def _raw(taps: Tensor) -> np.ndarray:
    """uint8 [..., bytes]"""
    size = taps.shape[-1] * taps.dtype.itemsize
    if not taps.numel():
        return np.empty((*taps.shape[:-1], size), dtype=np.uint8)
    return taps.view(torch.uint8).numpy()
