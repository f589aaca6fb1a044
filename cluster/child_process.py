"""A child process that runs a Wingbeat module in its own interpreter and ends with its parent."""

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
"""Signal on which a child that has called `show_stacks` writes the stacks of its threads."""

STATES = {"R": "running", "S": "waiting", "D": "waiting for a device", "T": "stopped by a signal", "Z": "gone"}


class ChildProcess:
    """Runs `python -m module FD... PARENT` as a child in which `fds` are open.

    The output of the child goes where the parent's output goes.

    Construct this object on a thread that lives as long as the child is needed, because the kernel ends the child when
    that thread ends.

    Args:
        env: additions to the parent's environment.
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
        """Process id of the child."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the child ends; return its exit code, or -N if signal N ended the child.

        Returns at the moment at which the child ends.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # a sandbox refuses the call, or an earlier wait has reaped the child
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
        """Send a signal; does nothing once the child has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL; does nothing once the child has ended."""
        self._process.kill()


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Call this function first in the child.

    Args:
        number: the signal; SIGKILL also ends a process that is stopped.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def show_stacks() -> None:
    """Make this process write the stacks of all threads to stderr on STACKS_SIGNAL.

    This works even while a thread holds the interpreter.
    """
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True, chain=False)


def threads_of(pid: int) -> list[str]:
    """Text lines from /proc, one for each thread of a process.

    A line has the thread's name, its state and, if available, the kernel function in which the thread waits.
    """
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits_for = (task / "wchan").read_text().strip("0\n")
        except OSError:  # the thread has ended, or the kernel refuses the read
            continue
        found.append(f"{task.name} {name} is {STATES.get(state, state)}" + (f" in {waits_for}" if waits_for else ""))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # the process has ended
        return False
