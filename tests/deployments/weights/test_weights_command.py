"""`wingbeat weights` calls a server over HTTP: its requests and its output."""

import json
from pathlib import Path

import pytest

from tests.deployments.cli_server import server  # noqa: F401 - a fixture
from wingbeat.deployments.cli import main as cli

ENGINES = {
    "a": {"weights": "d1", "folder": "/step-1", "pushed_at": 1.0, "state": "serves"},
    "b": {"weights": None, "folder": "/model", "pushed_at": None, "state": "drains"},
    "c": None,
}
CARD = {"object": "weights", "model": "demo", "weights": None, "folder": None, "engines": ENGINES}


@pytest.fixture
def weights(server, capsys):  # noqa: F811
    """Runs a command: exit code, stdout, stderr."""

    def run(*args):
        with pytest.raises(SystemExit) as end:
            cli.main(["weights", *map(str, args), "--url", server.url])
        return end.value.code, *capsys.readouterr()

    return run


def test_every_engine_is_shown_with_what_it_serves(server, weights):  # noqa: F811
    server.answer = (200, {"object": "list", "data": [CARD]})
    code, out, _ = weights("show")
    assert (code, server.asked[-1][:2]) == (0, ("GET", "/v1/weights"))
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:] == [
        ["demo", "a", "serves", "d1", "/step-1"],
        ["demo", "b", "drains", "of", "the", "settings", "/model"],
        ["demo", "c", "does", "not", "answer", "-", "-"],
    ]
    assert json.loads(weights("show", "--json")[1])["data"] == [CARD]


def test_a_folder_is_pushed_by_its_whole_path(server, weights):  # noqa: F811
    server.answer = (200, CARD)
    code, out, _ = weights("update", "step-1", "--drain-s", 5, "--model", "demo", "--operator-key", "k")
    assert (code, "/step-1" in out) == (0, True)
    fields = {"folder": str(Path("step-1").absolute()), "model": "demo", "drain_s": 5.0}
    assert server.asked[-1] == ("POST", "/v1/weights/update", "Bearer k", fields)


def test_a_refusal_is_one_line(server, weights):  # noqa: F811
    server.answer = (409, {"error": {"message": "The weights are not replaced."}})
    code, _, err = weights("update", "/step-1")
    assert (code, err) == (2, "wingbeat: The weights are not replaced.\n")
