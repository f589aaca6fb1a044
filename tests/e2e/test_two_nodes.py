"""A verifier and its drafter on two nodes of one cluster: the text is the plain one, whatever becomes of a node."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_pair_across_nodes_writes_plain_text_and_outlives_its_drafters_node():
    command = [sys.executable, "-m", "tests.e2e.two_nodes"]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # where Ray notes the local cluster
        env = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    # Ray may write behind it.
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["channel"] == "remote"
    assert found["speculated"]
    assert found["num_drafts"] > 0
    assert found["node_left"], "texts of streams whose drafter's node was removed"
    assert found["lost_after_s"] is not None
    assert found["without_a_drafter"]
    assert found["back_after_s"] is not None
    assert found["speculated_again"]
    assert found["num_drafts_again"] > 0
    assert found["same_engine"]
