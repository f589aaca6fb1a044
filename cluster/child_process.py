"""A child that runs a module of ours in an interpreter of its own, and does not outlive the process that started it."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """Runs `python -m module FD... PARENT` with these file descriptors open; its output goes where this process's does.

    Make it on a thread that lives as long as the child shall: the kernel ends the child with that very thread.

    Args:
        env: what the child's environment has beyond this process's.
    """

    def __init__(self, module: str, fds: Sequence[int], env: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, (*fds, os.getpid()))],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code once it has ended, -N where signal N ended it; known in the moment of its death."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # refused by a sandbox, or reaped by an earlier wait
            return await asyncio.to_thread(self._process.wait)
        ended, event_loop = asyncio.Event(), asyncio.get_running_loop()
        event_loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            event_loop.remove_reader(fd)
            os.close(fd)
        return self._process.wait()

    def kill(self) -> None:
        """End it without a word; harmless once it has ended."""
        self._process.kill()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, be it stopped or not. Call first in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
