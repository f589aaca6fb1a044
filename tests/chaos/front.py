"""Effects on clients when a process between them and the engines is killed or stopped.

    python -m tests.chaos.front 20 'kill router' 'pause launcher'

Does each act so many times, with connections that are idle, half-closed and in mid-stream and with requests that come
in that moment, and prints what came of them.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import httpx

from tests.chaos.served import Served, own

EACH = 3
"""Connections of a kind."""
PAUSE_S = 10.0
TOKENS, FEW_TOKENS = 240, 8
"""Tokens of a stream, and of a request that comes during the act; at most 40 tokens per second."""
PATIENCE_S = 120.0
"""Seconds that a client waits for each answer."""
PROBE_S = 0.1
SOON_S = 5.0


class Cell(NamedTuple):
    """An act, and its allowed effects on clients."""

    victim: str
    pause_s: float = 0.0
    """None: it is killed."""
    num_routers: int = 1
    breaks: bool = False
    """Answers that are under way may end before their end, and clients send the request again."""
    refuses: bool = False
    """New connections may be refused, or broken, for a while."""
    bound_s: float = 5.0
    """From the act to an answer for a new request, on a machine with processors to spare."""


CELLS = {
    "kill router": Cell("router", breaks=True),
    "pause router": Cell("router", PAUSE_S, bound_s=PAUSE_S + 5.0),
    "kill controller": Cell("controller"),
    "pause controller": Cell("controller", PAUSE_S),
    "pause launcher": Cell("launcher", PAUSE_S),
    "kill one of two routers": Cell("router", num_routers=2, breaks=True),
    "pause one of two routers": Cell("router", PAUSE_S, num_routers=2, bound_s=PAUSE_S + 5.0),
    "kill proxy": Cell("proxy", num_routers=2, breaks=True, refuses=True, bound_s=15.0),
    "pause proxy": Cell("proxy", PAUSE_S, num_routers=2, bound_s=PAUSE_S + 5.0),
    "kill controller of two routers": Cell("controller", num_routers=2),
}
LAST_CELLS = ("launcher", "raylet", "head")
"""Victims whose death ends the application."""


@dataclass
class Outcome:
    """Results of one or several acts."""

    times: int = 0
    back_s: list[float] = field(default_factory=list)
    """From the act to the first answer for a new connection."""
    refused: int = 0
    """New connections that were refused or broken before that."""
    num_streams: int = 0
    cut: int = 0
    """Number of streams that ended early and were sent again."""
    wrong: list[str] = field(default_factory=list)
    """Requests that failed, or had another text than the undisturbed one."""

    def add(self, other: "Outcome") -> None:
        """Sum up."""
        self.times += other.times
        self.back_s += other.back_s
        self.refused += other.refused
        self.num_streams += other.num_streams
        self.cut += other.cut
        self.wrong += other.wrong

    def __str__(self) -> str:
        back = sorted(self.back_s)
        return (
            f"{self.times} times; a new request is answered after {median(back):.1f} s, {back[-1]:.1f} s at most, "
            f"{sum(one <= SOON_S for one in back)} times within {SOON_S:g} s; "
            f"{self.refused} connections refused or broken before; {self.cut} of {self.num_streams} streams cut and "
            f"sent again; {len(self.wrong)} requests failed or wrote another text"
        )


class Front:
    """A server and its clients."""

    def __init__(self, num_routers: int) -> None:
        self.served = Served(num_routers)
        self._url = f"http://127.0.0.1:{self.served.port}"
        try:
            self._text = self._stream(TOKENS)
            self._few = self._text_of(self._post(FEW_TOKENS))
        except BaseException:
            self.served.close()
            raise

    def play(self, cell: Cell) -> Outcome:
        """Do it once, and wait until all is as before."""
        self.served.until(lambda: len(self.served.pids("router")) == cell.num_routers, PATIENCE_S)
        outcome, victim = Outcome(times=1), own(self.served.pids(cell.victim)[0])
        with ThreadPoolExecutor(3 * EACH) as threads, self._bystanders():
            begun: list[int] = []
            streams = [threads.submit(self._stream, TOKENS, begun) for _ in range(EACH)]
            self.served.until(lambda: len(begun) == EACH, PATIENCE_S)
            acted = time.monotonic()
            os.kill(victim.pid, signal.SIGSTOP if cell.pause_s else signal.SIGKILL)
            waiting = [threads.submit(self._post, FEW_TOKENS) for _ in range(EACH)]
            going_on = threads.submit(self._go_on, victim.pid, cell.pause_s)
            outcome.refused = self._probe(acted + PATIENCE_S)
            outcome.back_s.append(time.monotonic() - acted)
            going_on.result()
            for one in waiting:
                self._judge_waiting(cell, outcome, one)
            for one in streams:
                self._judge_stream(cell, outcome, one)
        if not cell.pause_s:
            assert not victim.alive()
        return outcome

    def _judge_waiting(self, cell: Cell, outcome: Outcome, asked: Future[httpx.Response]) -> None:
        """Judge a new request: a failure is a refusal if the act may break connections, else an error."""
        failure = asked.exception()
        if failure is not None and cell.breaks:
            outcome.refused += 1
            return
        if failure is not None or self._text_of(asked.result()) != self._few:
            outcome.wrong.append(f"a new request: {failure or asked.result().text}")

    def _judge_stream(self, cell: Cell, outcome: Outcome, stream: Future[str]) -> None:
        outcome.num_streams += 1
        failure = stream.exception()
        if failure is not None and cell.breaks:
            outcome.cut += 1
            failure, text = None, self._stream(TOKENS)
        else:
            text = "" if failure is not None else stream.result()
        if failure is not None or text != self._text:
            outcome.wrong.append(f"a stream: {failure or text}")

    @contextmanager
    def _bystanders(self) -> Iterator[None]:
        """Connections that are kept without a request, and such that will say nothing more."""
        request = json.dumps(self._body(TOKENS)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(request)}\r\n"
        opened = []
        for index in range(2 * EACH):
            connection = socket.create_connection(("127.0.0.1", self.served.port), timeout=PATIENCE_S)
            opened.append(connection)
            if index % 2:
                connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + request)
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in connection.recv(4096)
        try:
            yield
        finally:
            for connection in opened:
                connection.close()

    def _go_on(self, pid: int, pause_s: float) -> None:
        if pause_s:
            time.sleep(pause_s)
            os.kill(pid, signal.SIGCONT)

    def _probe(self, deadline: float) -> int:
        """New connections until one is answered; returns how many were not."""
        refused = 0
        while time.monotonic() < deadline:
            try:
                if self._get("/health").status_code == 200:
                    return refused
            except httpx.TransportError:
                pass
            refused += 1
            time.sleep(PROBE_S)
        raise AssertionError(f"nobody has answered for {PATIENCE_S:g} s:\n{self.served.log.read_text()}")

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self._url}{path}", timeout=PATIENCE_S)

    def _post(self, max_tokens: int) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/completions", json=self._body(max_tokens), timeout=PATIENCE_S)

    def _stream(self, max_tokens: int, begun: list[int] | None = None) -> str:
        """The text of a stream; notes in `begun` that it has begun.

        Raises:
            httpx.TransportError, AssertionError: it ends before its end.
        """
        text, body = [], {**self._body(max_tokens), "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return "".join(text)
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += [choice["text"] for choice in event["choices"]]
                    if begun is not None and len(text) == 1:
                        begun.append(1)
        raise AssertionError("the stream has no end")

    def _text_of(self, answer: httpx.Response) -> str:
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""

    def _body(self, max_tokens: int) -> dict:
        fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": "wingbeat-demo", "prompt": "def main():\n    ", **fields}


def play(name: str, times: int) -> Outcome:
    """An act in an application of its own, so many times."""
    cell, outcome = CELLS[name], Outcome()
    front = Front(cell.num_routers)
    try:
        for _ in range(times):
            outcome.add(front.play(cell))
    finally:
        front.served.close()
    return outcome


def play_last(victim: str) -> float:
    """Kill what the application does not outlive; seconds until nothing of it is left."""
    served = Served()
    try:
        served.processes()
        os.kill(served.pids(victim)[0], signal.SIGKILL)
        served.launcher.wait(PATIENCE_S)
        return served.gone_after()
    finally:
        served.close()


def main() -> None:
    """Play what is named, or everything."""
    times, names = int(sys.argv[1]), sys.argv[2:] or [*CELLS, *(f"kill {victim}" for victim in LAST_CELLS)]
    for name in names:
        if name in CELLS:
            print(f"{name}: {play(name, times)}", flush=True)
        else:
            seconds = sorted(play_last(name.removeprefix("kill ")) for _ in range(times))
            print(f"{name}: {times} times; nothing is left after {median(seconds):.1f} s, {seconds[-1]:.1f} s at most")


if __name__ == "__main__":
    main()
