"""Writes JSON in pieces, so that a long answer does not delay other streams, and so that its JSON is never in memory as
a whole.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any

MOST_ITEMS = 32
"""Number of list items that are written at a time. Writing them takes about a millisecond if each item has twenty
log-probabilities.
"""
PIECE_CHARS = 2**15
"""Number of characters above which the fragments collected so far are sent as one piece."""


class LongPart:
    """Part of a long list whose items are converted to JSON values only when they are written."""

    def __init__(
        self, items: Sequence[Any], as_value: Callable[[Any], Any] = lambda item: item, batch: int = MOST_ITEMS
    ) -> None:
        """Makes the part. `as_value` converts an item to its JSON value; `batch` is the number of items written at a
        time.
        """
        self._items, self._as_value, self._batch = items, as_value, batch

    def __len__(self) -> int:
        return len(self._items)

    def batches(self) -> Iterator[str]:
        """Yields the items' JSON in batches, without the list's brackets."""
        for start in range(0, len(self._items), self._batch):
            yield dumps([self._as_value(item) for item in self._items[start : start + self._batch]])[1:-1]


class SharedPart(LongPart):
    """Items with which several lists begin. The items' JSON is made when the first of these lists is written, and
    reused for the other lists.
    """

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
    """List of JSON values that is written in pieces."""

    def __init__(self, *parts: LongPart) -> None:
        self._parts = [part for part in parts if len(part)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def fragments(self) -> Iterator[str]:
        """Yields the list's JSON in fragments."""
        opening = "["
        for part in self._parts:
            for batch in part.batches():
                yield opening + batch
                opening = ","
        yield "[]" if opening == "[" else "]"


def json_pieces(fragments: Iterable[str]) -> Iterator[bytes]:
    """Joins fragments of JSON to pieces of about `PIECE_CHARS` characters."""
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
    """Yields the ASCII JSON of a value that may contain `LongList`s in objects and in lists of objects."""
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
    """Yields pieces. Each piece is made while the lock `turn` is held, and the event loop runs other tasks before the
    lock is released. Calls that share the lock therefore never make two pieces without a pause.
    """
    while True:
        async with turn:
            piece = next(pieces, None)
            await asyncio.sleep(0)
        if piece is None:
            return
        yield piece


def dumps(value: Any) -> str:
    """Returns compact JSON in ASCII, because some readers of streams split lines at U+2028."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
