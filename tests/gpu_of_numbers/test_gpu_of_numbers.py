"""The CUDA branches in numbers: a GPU whose memory is the host's, each file of cases in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.kernels.cpu.library import compiler

pytest.importorskip("triton")
if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def run(file: str, *options: str) -> None:
    """All cases of a file must pass, none be skipped."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", str(Path(__file__).with_name(file)), "-q", "-p", "no:cacheprovider"]
    command += ["--tb=short", "-m", "", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_the_device_computes_counts_and_captures_as_cuda_does():
    run("device_cases.py")
