"""A child that runs a module of ours in an interpreter of its own, and does not outlive the process that started it."""

import asyncio
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from wingbeat.runtime.interpreter import module_command, module_environment

_PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a child that has called `show_stacks` write where its threads are."""

STATES = {"R": "running", "S": "waiting", "D": "waiting for a device", "T": "stopped by a signal", "Z": "gone"}


class ChildProcess:
    """Runs `python -m module FD... PARENT` with these file descriptors open; its output goes where this process's does.

    Make it on a thread that lives as long as the child shall: the kernel ends the child with that very thread.

    Args:
        env: what the child's environment has beyond this process's.
    """

    def __init__(self, module: str, fds: Sequence[int], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            module_command(module, *fds, os.getpid()),
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env=module_environment(**(env or {})),
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

    def signal(self, number: int) -> None:
        """Send it a signal; harmless once it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a word; harmless once it has ended."""
        self._process.kill()


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Call first in the child.

    Args:
        number: SIGKILL ends it at once, be it stopped or not.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def show_stacks() -> None:
    """Have STACKS_SIGNAL write the stacks of all threads to stderr, also while one of them keeps the interpreter."""
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True, chain=False)


def threads_of(pid: int) -> list[str]:
    """What the kernel says of a process's threads: name, state and, where it tells, what each waits for."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits_for = (task / "wchan").read_text().strip("0\n")
        except OSError:  # it has ended, or the kernel does not tell
            continue
        found.append(f"{task.name} {name} is {STATES.get(state, state)}" + (f" in {waits_for}" if waits_for else ""))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # it has ended
        return False
