"""`wingbeat prefix` calls a server over HTTP: its requests, its output, and errors in one line."""

import json

import pytest

from tests.deployments.cli_server import server  # noqa: F401 - a fixture
from wingbeat.deployments.cli import main as cli

CARD = {"object": "prefix", "name": "p", "model": "demo", "tokens": 9, "blocks": 2, "bytes": 200, "engines": 1}
CARD["saved"] = None
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def prefix(server, capsys):  # noqa: F811
    """Runs a command: exit code, stdout, stderr."""
    server.answer = (200, CARD)

    def run(*args):
        url = [] if "--url" in args else ["--url", server.url]
        with pytest.raises(SystemExit) as end:
            cli.main(["prefix", *map(str, args), *url])
        return end.value.code, *capsys.readouterr()

    return run


def test_a_text_is_saved_as_a_system_message_or_as_a_prompt(server, prefix, tmp_path):  # noqa: F811
    (tmp_path / "system.txt").write_text("Be brief.")
    code, out, _ = prefix("save", "p", "--system", tmp_path / "system.txt", "--model", "sql", "--replace")
    assert code == 0
    assert "p" in out
    assert "200" in out
    messages = [{"role": "system", "content": "Be brief."}]
    sent = {"name": "p", "messages": messages, "model": "sql", "replace": True}
    assert server.asked == [("POST", "/v1/prefixes", None, sent)]
    prefix("save", "p", "--prompt", tmp_path / "system.txt")
    assert server.asked[-1][3] == {"name": "p", "prompt": "Be brief."}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_reached_whatever_proxy_the_environment_names(server, prefix, monkeypatch, host):  # noqa: F811
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    code, _, _ = prefix("delete", "p", "--url", server.url.replace("127.0.0.1", host))
    assert (code, len(server.asked)) == (0, 1)


@pytest.mark.parametrize("written", [MESSAGES, {"messages": MESSAGES, "tools": []}])
def test_messages_come_from_a_file(server, prefix, tmp_path, written):  # noqa: F811
    (tmp_path / "messages.json").write_text(json.dumps(written))
    code, out, _ = prefix("save", "p", "--messages", tmp_path / "messages.json", "--json")
    assert (code, json.loads(out)) == (0, CARD)
    sent = written if isinstance(written, dict) else {"messages": written}
    assert server.asked[-1][3] == {"name": "p", **sent}


def test_a_prefix_is_loaded_listed_and_deleted(server, prefix):  # noqa: F811
    assert prefix("load", "p")[0] == 0
    assert server.asked[-1] == ("POST", "/v1/prefixes", None, {"name": "p"})
    server.answer = (200, {"object": "list", "data": [CARD], "pinned_tokens": 8, "max_pinned_tokens": 40})
    code, out, _ = prefix("list")
    assert (code, server.asked[-1][:2]) == (0, ("GET", "/v1/prefixes"))
    assert "8 of 40 tokens are pinned" in out
    assert json.loads(prefix("list", "--json")[1]) == server.answer[1]
    code, out, _ = prefix("delete", "p/q")
    assert (code, out) == (0, "p/q is deleted\n")
    assert server.asked[-1][:2] == ("DELETE", "/v1/prefixes/p%2Fq")


def test_the_operators_key_is_sent(server, prefix, monkeypatch):  # noqa: F811
    prefix("load", "p", "--operator-key", "one, two")
    monkeypatch.setenv("WINGBEAT_OPERATOR_KEY", "three")
    prefix("load", "p")
    assert [asked[2] for asked in server.asked] == ["Bearer one", "Bearer three"]


def test_what_the_server_refuses_is_one_line(server, prefix):  # noqa: F811
    server.answer = (400, {"error": {"message": "'name' is taken.", "param": "name"}})
    assert prefix("load", "p") == (2, "", "wingbeat: 'name' is taken.\n")
    server.answer = (502, "no JSON object")
    code, _, error = prefix("load", "p")
    assert (code, "answers 502" in error, error.count("\n")) == (2, True, 1)


def test_a_key_follows_no_redirect(server, prefix):  # noqa: F811
    server.answer, server.headers = (302, {}), {"Location": f"{server.url}/elsewhere"}
    code, _, error = prefix("list", "--operator-key", "secret")
    assert (code, len(server.asked)) == (2, 1)
    assert "302" in error


def test_mistakes_are_one_line(prefix, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for args, problem in (
        (("save", "p"), "give one of --system, --messages and --prompt"),
        (("save", "p", "--system", "a", "--prompt", "b"), "give one of"),
        (("save", "p", "--system", tmp_path / "none"), "cannot be read"),
        (("save", "p", "--messages", tmp_path / "bad.json"), "neither a list of messages"),
        (("list", "--url", "file:///etc/passwd"), "must begin with http"),
        (("list", "--url", "http://127.0.0.1:1"), "does not answer"),
    ):
        code, _, error = prefix(*args)
        assert (code, error.count("\n")) == (2, 1)
        assert problem in error
