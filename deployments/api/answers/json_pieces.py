"""JSON written piece by piece, so that a long answer holds up no other stream and is never whole in memory."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any

MOST_ITEMS = 32
"""Of a long list in one piece: with twenty log-probabilities each about a millisecond."""
PIECE_CHARS = 2**15


class LongPart:
    """Some items of a long list, each made when it is written."""

    def __init__(
        self, items: Sequence[Any], as_value: Callable[[Any], Any] = lambda item: item, batch: int = MOST_ITEMS
    ) -> None:
        """`batch`: how many of them are written at a time."""
        self._items, self._as_value, self._batch = items, as_value, batch

    def __len__(self) -> int:
        return len(self._items)

    def batches(self) -> Iterator[str]:
        """Their JSON, a few at a time, without brackets."""
        for start in range(0, len(self._items), self._batch):
            yield dumps([self._as_value(item) for item in self._items[start : start + self._batch]])[1:-1]


class SharedPart(LongPart):
    """Items that several lists begin with: they are made once."""

    _written: list[str] | None = None

    def batches(self) -> Iterator[str]:
        """See `LongPart`."""
        if self._written is not None:
            yield from self._written
            return
        written = []
        for batch in super().batches():
            written.append(batch)
            yield batch
        self._written = written


class LongList:
    """A list of JSON values that is longer than what is written at a time."""

    def __init__(self, *parts: LongPart) -> None:
        self._parts = [part for part in parts if len(part)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def fragments(self) -> Iterator[str]:
        """Its JSON."""
        opening = "["
        for part in self._parts:
            for batch in part.batches():
                yield opening + batch
                opening = ","
        yield "[]" if opening == "[" else "]"


def json_pieces(fragments: Iterable[str]) -> Iterator[bytes]:
    """Fragments of JSON in pieces that are worth a message; one holds little more than the longest fragment."""
    held, num_chars = [], 0
    for fragment in fragments:
        held.append(fragment)
        num_chars += len(fragment)
        if num_chars > PIECE_CHARS:
            yield "".join(held).encode()
            held, num_chars = [], 0
    if held:
        yield "".join(held).encode()


def fragments(value: Any) -> Iterator[str]:
    """The JSON of a value that holds `LongList`s in objects and in lists of objects, in ASCII."""
    if isinstance(value, LongList):
        yield from value.fragments()
    elif isinstance(value, dict):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{dumps(key)}:"
            yield from fragments(item)
            opening = ","
        yield "{}" if opening == "{" else "}"
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        opening = "["
        for item in value:
            yield opening
            yield from fragments(item)
            opening = ","
        yield "]"
    else:
        yield dumps(value)


async def paced(pieces: Iterator[bytes], turn: asyncio.Lock) -> AsyncGenerator[bytes, None]:
    """The pieces; between any two that are made under one lock the event loop serves whoever else waits."""
    while True:
        async with turn:
            piece = next(pieces, None)
            await asyncio.sleep(0)
        if piece is None:
            return
        yield piece


def dumps(value: Any) -> str:
    """JSON without blanks."""
    # ASCII: some readers of streams split lines at U+2028.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
