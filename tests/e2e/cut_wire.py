"""The way between a browser and a server, which a test can cut and mend."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class CutWire:
    """Passes bytes on, both ways, between its own port and a server's."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url).hostname, urlsplit(url).port
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.mend()

    def mend(self) -> None:
        """Listen, on the same port as ever."""
        self._run(self._listen())

    def cut(self) -> None:
        """Nobody listens, and every connection ends where it is."""
        self._run(self._end())

    def close(self) -> None:
        """Cut, for good."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self._port)

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        finally:
            self._writers -= {writer, back}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


@contextmanager
def wire_to(url: str) -> Iterator[CutWire]:
    """A wire for as long as the block lasts."""
    wire = CutWire(url)
    try:
        yield wire
    finally:
        wire.close()
