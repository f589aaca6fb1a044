"""The kernels compile for the GPUs they are written for; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")
SHARED_BYTES = 227 * 1024  # what a program may use on compute capability 9.0


def compiled(tmp_path: Path, *arguments: str) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path):
    tree, decode, merge, store, move = compiled(tmp_path)
    assert all(result["shared_bytes"] <= SHARED_BYTES for result in (tree, decode, merge, store, move))
    assert tree["wgmma"], "a tile of 128 rows belongs on the warpgroup instructions"
    assert tree["copies_16_bytes"] > 0
    assert decode["copies_16_bytes"] > 0
    assert store["copies_16_bytes"] > 0
    assert move["barriers"] > 0, "nothing orders a program's reads before its writes"


@pytest.mark.parametrize(
    ("stride", "least"), [pytest.param(5, 15, marks=pytest.mark.slow), pytest.param(1, 30, marks=pytest.mark.soak)]
)
def test_tile_configurations_compile_within_the_shared_memory(tmp_path, stride, least):
    results = compiled(tmp_path, str(stride))
    assert len(results) >= least
    assert max(result["shared_bytes"] for result in results) <= SHARED_BYTES
