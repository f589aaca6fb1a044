"""`wingbeat drafter` calls a server over HTTP: its requests and its output."""

import json

import pytest

from tests.deployments.cli_server import server  # noqa: F401 - a fixture
from wingbeat.deployments.cli import main as cli

VERSIONS = [
    {"number": 0, "state": "configured", "source": "configured", "reason": "", "acceptance": None},
    {
        "number": 3,
        "state": "promoted",
        "source": "learner",
        "reason": "better by 2%",
        "acceptance": {"length": 3.25, "low": 3.2, "high": 3.3, "rounds": 900},
    },
]
ANSWER = {
    "object": "drafter",
    "served": 3,
    "versions": VERSIONS,
    "learner": {"state": "training", "steps": 70, "samples": 12},
    "recording": {"a": {"stopped": None}, "b": {"stopped": "OSError: no space"}, "c": None},
    "last_decision": {"what": "promoted", "reason": "better by 2%"},
}


@pytest.fixture
def drafter(server, capsys):  # noqa: F811
    """Runs a command: exit code, stdout, stderr."""
    server.answer = (200, ANSWER)

    def run(*args):
        with pytest.raises(SystemExit) as end:
            cli.main(["drafter", *map(str, args), "--url", server.url])
        return end.value.code, *capsys.readouterr()

    return run


def test_versions_are_listed_with_what_was_measured(server, drafter):  # noqa: F811
    code, out, _ = drafter("list")
    assert (code, server.asked[-1][:2]) == (0, ("GET", "/v1/drafter"))
    assert "3 (served)" in out
    assert "3.200 to 3.300" in out
    assert "learner: training, 70 steps, 12 requests held" in out
    assert "last decision: promoted: better by 2%" in out
    assert "b records nothing for now: OSError: no space" in out
    assert out.count("records nothing") == 1
    assert json.loads(drafter("list", "--json")[1]) == ANSWER


def test_versions_are_promoted_and_rolled_back_and_a_ledger_repaired(server, drafter):  # noqa: F811
    assert drafter("promote", 3, "--reason", "why", "--operator-key", "k")[0] == 0
    assert server.asked[-1] == ("POST", "/v1/drafter/promote", "Bearer k", {"version": 3, "reason": "why"})
    drafter("promote", "--folder", "mine")
    assert server.asked[-1][3] == {"folder": "mine"}
    drafter("rollback")
    assert server.asked[-1][1:] == ("/v1/drafter/rollback", None, {})
    drafter("repair")
    assert server.asked[-1][1:] == ("/v1/drafter/repair", None, {})


def test_one_of_both_is_needed_and_a_refusal_is_one_line(server, drafter):  # noqa: F811
    code, _, err = drafter("promote")
    assert (code, "give a version or --folder" in err) == (2, True)
    server.answer = (409, {"error": {"message": "There is no version before."}})
    code, _, err = drafter("rollback")
    assert (code, err) == (2, "wingbeat: There is no version before.\n")
