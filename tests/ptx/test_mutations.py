"""The machine notices what is missing: barriers and waits are left out of compiled kernels one by one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LEAST_NOTICED = 0.75
"""Least share of mutations to be noticed: Triton also waits after a loop that has awaited all copies, needlessly."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_a_barrier_or_a_wait_that_is_left_out_is_noticed(capability):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(Path(__file__).with_name("mutations.py")), str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    tried = [json.loads(line) for line in done.stdout.splitlines()]
    noticed = [result for result in tried if result["noticed"] is not None]
    print(f"sm_{capability}: {len(noticed)} of {len(tried)} noticed")
    assert {result["kernel"] for result in noticed} == {"tree_attention_kernel", "_move_kv_kernel"}
    assert len(noticed) >= LEAST_NOTICED * len(tried)
