"""Stages, each in namespaces of its own: nothing that is done there reaches another process of the machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import ROOT

SHARED_MEMORY = "800m"
"""Size of a stage's own shared memory, which an act may fill."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-times", type=int, default=1, help="how often test_repeated and test_front do each act")


def in_namespaces(*command: str) -> list[str]:
    """The command as the first process of a PID namespace, with a /dev/shm of its own; all of it ends with it."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && exec "$@"'
    namespaces = ["unshare", *as_root, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*namespaces, "sh", "-c", mount, "sh", *command]


class Stage:
    """A running `tests.chaos.stage`."""

    def __init__(self, scenario: str, folder: str) -> None:
        # A process of a session-wide cluster may be noted in the environment.
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._process = subprocess.Popen(
            in_namespaces(sys.executable, "-m", "tests.chaos.stage", scenario),
            cwd=ROOT,
            env=env | {"RAY_TMPDIR": folder},  # where Ray notes the local cluster
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def play(self, act: str) -> dict[str, Any]:
        """Play an act and return its result."""
        self._process.stdin.write(f"{act}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> dict[str, Any]:
        """End the application and return what it left behind."""
        self._process.stdin.close()
        return self._answer()

    def close(self) -> None:
        """End every process of the stage."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        line = next((line for line in self._process.stdout if line.startswith("{")), None)
        assert line is not None, "the stage has ended; its error is above"
        return json.loads(line)


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The scenario of the fixture's parameter."""
    if subprocess.run(in_namespaces("true"), check=False, capture_output=True).returncode:
        pytest.skip("this machine gives no namespaces (unshare)")
    folder = tempfile.mkdtemp(prefix="wbc")
    stage = None
    try:
        stage = Stage(request.param, folder)
        yield stage
        assert stage.end() == {"leaks": []}
    finally:
        if stage is not None:
            stage.close()
        shutil.rmtree(folder, ignore_errors=True)
