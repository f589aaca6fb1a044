"""Schemathesis as it is installed: thousands of requests made of our API description, and no error of the server."""

import subprocess
import sys

import pytest
from pydantic import SecretStr

from tests.e2e.page_server import serving
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.endpoints import drafter_routes
from wingbeat.deployments.api.endpoints.drafter_routes import HeadVersions
from wingbeat.runtime.head_versions import HeadLedger

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = 10
"""Drawn for each endpoint, beside those that the description leads to by itself."""
KEY = "operators"


def test_no_request_that_the_description_leads_to_is_an_error_of_the_server(tmp_path, monkeypatch):
    pytest.importorskip("schemathesis")
    monkeypatch.setattr(drafter_routes, "TOLD_S", 0.1)  # no drafter follows this ledger
    heads = HeadVersions(HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model"), None)
    with serving(Access(operator_keys=(SecretStr(KEY),)), heads=heads) as url:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{url}/openapi.json",
            "--checks=not_a_server_error",
        ]
        command += [f"--max-examples={EXAMPLES}", "--request-timeout=60", "--no-color", "--continue-on-failure"]
        command += [f"--header=Authorization: Bearer {KEY}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert "No issues found" in found.stdout
