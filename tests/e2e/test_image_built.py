"""The Dockerfile carried out, and its command started: `docker build` and `docker run` without Docker."""

import json
import os
import subprocess
import sys

import pytest

from tests.chaos.conftest import in_namespaces
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
NEEDS = ("unshare --mount --pid --fork true", "chroot / true", "apt-get --version")


def test_the_image_is_built_starts_is_healthy_answers_and_ends_in_order(tmp_path):
    if os.geteuid() or any(subprocess.run(need.split(), check=False, capture_output=True).returncode for need in NEEDS):
        pytest.skip("needs root, namespaces and a Debian")
    if subprocess.run(["apt-get", "update"], check=False, capture_output=True).returncode:
        pytest.skip("Debian's packages are out of reach")
    command = in_namespaces(sys.executable, "-m", "tests.e2e.image_box", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, "the instruction that failed is above"
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["text"]
    assert found["user"] == 1000
    assert found["exit_code"] == 0
    assert found["left"] == []
