"""Processes forked from one that has imported what they need: an import of torch takes seconds, a fork milliseconds.

The fork server is a child of the process that asks. What it forked ends with it, and it ends with that process.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.child_process import ChildProcess, die_with_parent
from wingbeat.cluster.mps import under_mps

MODULE = "wingbeat.cluster.fork_server"
FORK_S = 180.0
"""For a process, the first of which waits until everything is imported."""
ASKED_S, ASKED_POLL_S = 2.0, 0.005
"""For a process that was asked to end to finish its work on a GPU."""
LONGEST = 4096
"""Bytes of a message between a fork server and the process that asks."""
Target = Callable[[Connection], None]


class Forked(NamedTuple):
    """A process, and the caller's end of the pipe to it."""

    pid: int
    connection: Connection

    def kill(self) -> None:
        """End it, be it stopped or not; harmless once it has ended. Waits for nothing but as `end_process` does.

        Its fork server keeps the process id until it forks the next one.
        """
        self.connection.close()
        end_process(self.pid)


def end_process(pid: int) -> None:
    """Kill a process; a client of CUDA's multi-process service is asked first, and has `ASKED_S` to end by itself.

    A client that ends by SIGKILL with work on the device may take the service's server and all its clients with it.
    """
    try:
        if under_mps():
            os.kill(pid, signal.SIGTERM)
            process = PeerProcess(pid, process_start(pid))
            deadline = time.monotonic() + ASKED_S
            while process.alive() and time.monotonic() < deadline:
                time.sleep(ASKED_POLL_S)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class ForkServer:
    """Forks processes that call one function. Make it on a thread that lives as long as they shall.

    Args:
        target: `module:function`; the function gets its end of a pipe, and its process ends when it returns.
        env: what their environment has beyond this process's.
    """

    def __init__(self, target: str, env: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(FORK_S)
        with theirs:
            self._process = ChildProcess(MODULE, (theirs.fileno(),), env)
        self._control.send(target.encode())

    def fork(self) -> Forked:
        """Another process; the first one waits until everything is imported.

        Raises:
            EOFError: the server has ended, as where its imports fail, or has not answered in time and was killed.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            answer = self._control.recv(LONGEST)
        except TimeoutError:
            ours.close()
            self._process.kill()
            raise EOFError(f"the server that forks processes has not answered within {FORK_S:.0f} s") from None
        except OSError:  # closed, or the server is gone
            answer = b""
        if not answer:
            ours.close()
            raise EOFError("the server that forks processes has ended")
        return Forked(int(answer), Connection(ours.detach()))

    def close(self) -> None:
        """End it and all that it forked."""
        if under_mps():  # it ends what it forked, and then itself
            self._process.signal(signal.SIGTERM)
        else:
            self._process.kill()
        self._control.close()


def main() -> None:
    """Import the target, then fork on request until the process that asks is gone."""
    control_fd, parent = map(int, sys.argv[1:])
    children: list[int] = []
    if under_mps():
        signal.signal(signal.SIGTERM, lambda number, frame: _end(children))
        die_with_parent(parent, signal.SIGTERM)
    else:
        die_with_parent(parent)
    # Of a terminal's Ctrl-C the process that asks decides, which gets it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        # Here and below for ever: the kernel ends this process with the one that asks, be that killed or not.
        module, _, name = control.recv(LONGEST).decode().partition(":")
        # Memory is shared until it is written to, and a collection writes to every object that is not frozen.
        gc.disable()
        target: Target = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        server = os.getpid()
        while True:
            message, fds, _, _ = socket.recv_fds(control, LONGEST, 1)
            if not message:
                _end(children)
            _reap()
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                control.close()
                _run(target, Connection(fds[0]), server)
            os.close(fds[0])
            children[:] = [*(child for child in children if _is_there(child)), pid]
            control.send(str(pid).encode())


def _end(children: list[int]) -> NoReturn:
    """The end of the server: what it forked goes first, as each must."""
    for pid in children:
        if _is_there(pid):
            end_process(pid)
    os._exit(0)


def _is_there(pid: int) -> bool:
    """Of a child that may have been reaped, and whose id is then somebody else's."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _reap() -> None:
    """Let go of processes that have ended: until then nobody else can get their ids."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def _run(target: Target, connection: Connection, server: int) -> None:
    """In the forked process; never returns."""
    code = 1
    try:
        die_with_parent(server)
        target(connection)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
