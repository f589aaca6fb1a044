"""Schemathesis as it is installed: thousands of requests made of the description of an API."""

import subprocess
import sys

EXAMPLES = 10
"""Drawn for each endpoint, beside those that the description leads to by itself."""


def check_no_errors(url: str, key: str) -> None:
    """Assert that no request that a server's description leads to is an error of the server."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks=not_a_server_error"]
    command += [f"--max-examples={EXAMPLES}", "--request-timeout=60", "--no-color", "--continue-on-failure"]
    command += [f"--header=Authorization: Bearer {key}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert "No issues found" in found.stdout
