"""Fork server: a process that has imported torch and forks other processes. A fork takes milliseconds, whereas an
import of torch takes seconds.

The fork server is a child of its client. Forked processes end with the fork server, which ends with its client.
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
"""Maximum seconds that a fork may take; the first fork waits until the server has imported the target's module."""
ASKED_S, ASKED_POLL_S = 2.0, 0.005
"""Seconds allowed to a process after SIGTERM for finishing its work on a GPU, and the interval in seconds between
checks whether the process has ended.
"""
LONGEST = 4096
"""Maximum bytes of a message between a fork server and its client."""
Target = Callable[[Connection], None]


class Forked(NamedTuple):
    """A forked process, and the caller's end of the pipe to it."""

    pid: int
    connection: Connection

    def kill(self) -> None:
        """Kill the process, even if it is stopped; does nothing once it has ended. May wait as `end_process` does.

        The fork server reaps the killed process at its next fork; until then the kernel does not reuse the process id.
        """
        self.connection.close()
        end_process(self.pid)


def end_process(pid: int) -> None:
    """Kill a process.

    Under CUDA's multi-process service the process first gets SIGTERM, and `ASKED_S` seconds to end by itself.

    If a client of the service is killed while it has work on the device, the service's server may end with all its
    clients.
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
    """Forks processes that call one function.

    Construct this object on a thread that lives as long as the processes are needed.

    Args:
        target: `module:function`. The function is called with the forked process's end of a pipe, and the process ends
            when the function returns.
        env: environment variables of the server, in addition to this process's.
    """

    def __init__(self, target: str, env: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(FORK_S)
        with theirs:
            self._process = ChildProcess(MODULE, (theirs.fileno(),), env)
        self._control.send(target.encode())

    def fork(self) -> Forked:
        """Fork another process; the first call waits until everything is imported.

        Raises:
            EOFError: the server has ended, for example because its imports failed; or the server did not answer in time
                and was killed.
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
        except OSError:  # this object was closed, or the server is gone
            answer = b""
        if not answer:
            ours.close()
            raise EOFError("the server that forks processes has ended")
        return Forked(int(answer), Connection(ours.detach()))

    def close(self) -> None:
        """End the server and all processes that it forked."""
        if under_mps():  # on SIGTERM the server ends the processes that it forked, then itself
            self._process.signal(signal.SIGTERM)
        else:
            self._process.kill()
        self._control.close()


def main() -> None:
    """Import the target, then fork a process for each request until the client is gone."""
    control_fd, parent = map(int, sys.argv[1:])
    children: list[int] = []
    if under_mps():
        signal.signal(signal.SIGTERM, lambda number, frame: _end(children))
        die_with_parent(parent, signal.SIGTERM)
    else:
        die_with_parent(parent)
    # A terminal sends Ctrl-C to the client too, and the client decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        # This wait and the waits below need no time limit, because the kernel ends this process when its client ends,
        # whatever ends the client.
        module, _, name = control.recv(LONGEST).decode().partition(":")
        # A forked process shares memory with this one until one of them writes to it, and a garbage collection writes
        # to every object that is not frozen.
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
    """End the server, after all processes that it forked."""
    for pid in children:
        if _is_there(pid):
            end_process(pid)
    os._exit(0)


def _is_there(pid: int) -> bool:
    """Whether a child still runs. A child that has ended is reaped, and its id may then belong to another process."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _reap() -> None:
    """Reap ended processes; until then their ids cannot be reused."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def _run(target: Target, connection: Connection, server: int) -> None:
    """Call the target in the forked process, then end the process; never returns."""
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
