"""Within one and a half times its idle memory a server outlives whatever is sent to it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_limit.py"
MINUTES = 5


@pytest.mark.ray
@pytest.mark.soak
def test_nothing_is_killed_and_bystanders_are_answered(tmp_path):
    output = tmp_path / "memory_limit.json"
    command = [sys.executable, SCRIPT, "--minutes", str(MINUTES), "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES + 600, check=False)
    assert output.is_file(), done.stderr[-2000:]
    figures = json.loads(output.read_text(encoding="utf-8"))["figures"]
    assert not figures["kills"], done.stdout
    assert not figures["lost"], done.stdout
    assert set(figures["bystanders"]) <= {"200", "503"}, done.stdout
    assert figures["peak_bytes"] <= 1.5 * figures["idle_bytes"], done.stdout
