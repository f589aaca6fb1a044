"""A client that sends any bytes, one connection a request, and reads what comes until the server closes."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .case import Case
from .contract import COMPLETIONS, KEY, MODEL

TIMEOUT_S = 60.0


class Address(NamedTuple):
    """Where an application listens."""

    host: str
    port: int
    prefix: str


@dataclass
class Answer:
    """A response; status 0 if the connection closed without any."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    """Whether the body is as long as the server said."""
    rest: bytes = b""
    """Bytes that the connection brought after the response."""
    hung: bool = False
    """Whether the server neither answered nor closed in time."""

    def all(self, name: str) -> list[str]:
        """Values of every header of that name."""
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The first of them."""
        return next(iter(self.all(name)), None)


async def send(address: Address, case: Case, timeout_s: float = TIMEOUT_S) -> Answer:
    """The answer to a request."""
    return await exchange(address, case.wire(address.prefix), timeout_s=timeout_s)


async def exchange(
    address: Address, data: bytes, *, half_close: bool = False, first_only: bool = False, timeout_s: float = TIMEOUT_S
) -> Answer:
    """Write bytes, read to the end of the connection.

    Args:
        half_close: say after the bytes that no more will come.
        first_only: read the first answer only, as the server may keep the connection.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    received = bytearray()

    async def read() -> None:
        while some := await reader.read(2**16):
            received.extend(some)
            if first_only and parse(bytes(received)).complete:
                return

    reading = asyncio.ensure_future(read())
    try:
        async with asyncio.timeout(timeout_s):
            # The server may close before it has read everything; what it said is still to be read.
            with suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
                if half_close:
                    writer.write_eof()
            await asyncio.wait({reading})
    except TimeoutError:
        return Answer(hung=True, body=bytes(received))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()
    return parse(bytes(received))


def parse(data: bytes) -> Answer:
    """The first response in what a connection brought; interim ones are skipped."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found or not head.startswith(b"HTTP/1."):
        return Answer(body=data)
    status, *lines = head.decode("latin-1").split("\r\n")
    if status.split()[1].startswith("1"):
        return parse(rest)
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    answer = Answer(int(status.split()[1]), headers)
    if answer.header("transfer-encoding") == "chunked":
        answer.body, answer.complete, answer.rest = _unchunked(rest)
    else:
        length = int(answer.header("content-length") or len(rest))
        answer.complete = len(rest) >= length
        answer.body, answer.rest = rest[:length], rest[length:]
    return answer


def _unchunked(data: bytes) -> tuple[bytes, bool, bytes]:
    """The body, whether its last chunk was there, and what followed."""
    pieces = []
    while True:
        line, found, data = data.partition(b"\r\n")
        if not found:
            return b"".join(pieces), False, b""
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces), True, data.removeprefix(b"\r\n")
        pieces.append(data[:size])
        data = data[size + 2 :]


def completion(**fields: Any) -> Case:
    """A well-formed completion, greedy unless the fields say otherwise."""
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **fields}
    headers = (("Host", "127.0.0.1"), ("Authorization", f"Bearer {KEY}"), ("Content-Type", "application/json"))
    return Case("POST", COMPLETIONS, headers, json.dumps(body).encode())


def health() -> Case:
    """The question whether the server is up."""
    return Case("GET", "/health", (("Host", "127.0.0.1"),))
