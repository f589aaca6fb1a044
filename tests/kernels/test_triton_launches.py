"""The layer, sampling and tree kernels compile, as they are launched, for the GPUs they are written for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("compile_launches.py")
KERNELS = {
    "_add_rms_norm_kernel",
    "_rotate_and_store_kernel",
    "_silu_mul_kernel",
    "_fp8_linear_kernel",
    "_shrink_kernel",
    "_expand_kernel",
    "_noise_kernel",
    "_scale_kernel",
    "_collect_kernel",
    "_edge_kernel",
    "_search_kernel",
    "_filter_kernel",
    "_merge_kernel",
    "_share_kernel",
    "_merge_shares_kernel",
    "_level_kernel",
    "_finalize_kernel",
    "_walk_kernel",
    "_ancestors_kernel",
    "_paths_kernel",
}


@pytest.mark.slow
def test_every_launch_compiles_for_hopper(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["kernel"] for result in results} == KERNELS
    # Several programs share a multiprocessor, whose shared memory is 228 KiB.
    assert max(result["shared_bytes"] for result in results) <= 64 * 1024
