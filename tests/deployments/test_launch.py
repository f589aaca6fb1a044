"""A served application from start to end, without Ray: refusals at the start, and signals."""

import json
import shlex
import signal
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tests.deployments.fake_ray import REPORT
from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication, StartError, serve_until_stopped
from wingbeat.deployments.router import warn_if_open
from wingbeat.deployments.start_up import ready_facts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")


@pytest.mark.parametrize(
    ("name", "default"), [("RAY_worker_niceness", "0"), ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "0.5")]
)
@pytest.mark.parametrize("told", [None, "5"])
def test_ray_is_started_for_serving_unless_the_environment_says_otherwise(fake_ray, monkeypatch, name, default, told):
    fake = fake_ray()
    environ = {} if told is None else {name: told}
    monkeypatch.setattr(launch.os, "environ", environ)
    seen = []
    monkeypatch.setattr(fake, "init", lambda **options: seen.append(environ[name]))
    ServedApplication(AppConfig()).start()
    assert seen == [told or default]


@pytest.mark.parametrize("attached", [True, False])
def test_an_application_of_the_name_in_the_cluster_is_refused_in_one_line_and_left_alone(fake_ray, attached):
    fake = fake_ray(attached=attached, applications=("wingbeat",))
    with pytest.raises(StartError, match="has an application named wingbeat already") as refused:
        serve_until_stopped(AppConfig())
    assert "\n" not in str(refused.value)
    assert "run" not in fake.calls
    assert "delete wingbeat" not in fake.calls


def test_a_start_that_failed_says_no_more_what_it_waits_for(fake_ray):
    fake = fake_ray()

    def broken(app, name):
        raise ValueError("no such model")

    fake.run = broken
    with pytest.raises((StartError, ValueError)):
        serve_until_stopped(AppConfig())
    for thread in threading.enumerate():
        if thread.name == "start-up":
            thread.join(1.0)
            assert not thread.is_alive()


def test_the_address_printed_is_where_the_cluster_listens(fake_ray, capsys):
    fake = fake_ray(attached=True)
    fake.listens = SimpleNamespace(host="10.0.0.1", port=80)
    fake.signals = {("status", 4): signal.SIGTERM}
    serve_until_stopped(AppConfig(), port=9000)
    assert "http://10.0.0.1:80/v1" in capsys.readouterr().out


def test_an_application_that_is_deleted_while_it_starts_is_not_said_to_be_ready(fake_ray, capsys):
    fake = fake_ray(attached=True)
    fake.run = lambda app, name: None
    with pytest.raises(StartError, match="application was deleted while it was starting"):
        serve_until_stopped(AppConfig())
    assert "/v1" not in capsys.readouterr().out


def test_a_cluster_that_is_named_is_joined_and_its_application_ends_with_the_command(fake_ray, capsys):
    fake = fake_ray(attached=True)
    fake.signals = {("status", 4): signal.SIGTERM}
    serve_until_stopped(AppConfig(), address="10.0.0.1:6379")
    assert fake.address == "10.0.0.1:6379"
    assert fake.calls[-2:] == ["drain", "delete wingbeat"]
    assert "Ctrl-C ends the application." in capsys.readouterr().out


def test_a_detached_application_stays_when_the_command_ends(fake_ray, capsys):
    fake = fake_ray(attached=True)
    serve_until_stopped(AppConfig(), address="10.0.0.1:6379", detach=True)
    assert fake.calls == ["start", "status", "run", "status"]
    assert "keeps running after this command" in capsys.readouterr().out


def test_a_detached_application_that_cannot_start_is_taken_away(fake_ray):
    fake = fake_ray(attached=True)
    fake.signals = {("run", 1): signal.SIGTERM}
    serve_until_stopped(AppConfig(), address="10.0.0.1:6379", detach=True)
    assert fake.calls[-1] == "delete wingbeat"


def test_there_is_nothing_to_detach_from_in_a_ray_that_ends_with_the_command(fake_ray):
    fake = fake_ray()
    with pytest.raises(StartError, match="--detach needs a running cluster"):
        serve_until_stopped(AppConfig(), detach=True)
    assert "run" not in fake.calls


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_routers_before_anything_is_taken_down(fake_ray, number):
    fake = fake_ray()
    fake.signals = {("status", 4): number}
    serve_until_stopped(AppConfig(shutdown_timeout_s=7))
    assert fake.drain_timeouts == [7]
    assert fake.calls[-3:] == ["drain", "shutdown", "shutdown"]


def test_a_signal_during_the_start_takes_down_what_there_is(fake_ray):
    fake = fake_ray()
    fake.signals = {("run", 1): signal.SIGTERM}
    serve_until_stopped(AppConfig())
    assert fake.calls == ["start", "status", "run", "shutdown", "shutdown"]


def test_in_a_cluster_of_others_only_the_application_is_deleted(fake_ray):
    fake = fake_ray(attached=True)
    fake.signals = {("run", 1): signal.SIGTERM}
    serve_until_stopped(AppConfig())
    assert fake.calls == ["start", "status", "run", "delete wingbeat"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("call", ["drain", "shutdown"])
def test_a_second_signal_ends_the_process_at_once_by_the_signals_exit_code(fake_ray, monkeypatch, call, number):
    class Exited(Exception):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    fake = fake_ray()
    ended, process = [], SimpleNamespace(pid=1)
    monkeypatch.setattr(launch, "descendants", lambda pid: [process])
    monkeypatch.setattr(launch, "end", lambda processes, grace_s: ended.append((processes, grace_s)))
    monkeypatch.setattr(launch, "remove_stale_segments", lambda: ended.append("segments"))
    monkeypatch.setattr(launch.os, "_exit", leave)
    fake.signals = {("status", 4): signal.SIGTERM, (call, 1): number}
    with pytest.raises(Exited) as exited:
        serve_until_stopped(AppConfig())
    assert exited.value.args == (128 + number,)
    assert fake.calls[-1] == call
    assert ended[0] == ([process], 0.0)
    assert ended[-1] == "segments"


def test_a_router_that_is_gone_does_not_keep_the_rest_from_being_taken_down(fake_ray):
    fake = fake_ray()
    application = ServedApplication(AppConfig())
    application.start()

    def broadcast(method: str, timeout_s: float) -> SimpleNamespace:
        answer: Future = Future()
        answer.set_exception(TimeoutError("no answer"))
        return SimpleNamespace(results=lambda timeout_s: answer.result())

    fake._broadcast = broadcast
    application.drain()
    application.close()
    assert fake.calls[-2:] == ["shutdown", "shutdown"]


@pytest.mark.parametrize(
    ("host", "key", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", "hidden", False), ("127.0.0.1", None, False)]
)
def test_a_server_that_other_machines_reach_without_a_key_says_so(
    caplog: pytest.LogCaptureFixture, host: str, key: str | None, warns: bool
):
    warn_if_open(AppConfig(api_key=key), host)
    assert [host in record.getMessage() for record in caplog.records] == [True] * warns


def test_the_last_block_says_where_what_and_how_to_try_it(fake_ray, monkeypatch, capsys):
    fake = fake_ray()
    fake.signals = {("status", 4): signal.SIGTERM}
    monkeypatch.setenv("COLUMNS", "40")
    serve_until_stopped(AppConfig(api_key="secret"))
    shown = capsys.readouterr().out
    block = shown[shown.index("Ready after") :]
    for words in (
        "Serving on http://127.0.0.1:8000/v1",
        "model     wingbeat-demo (float32 on cpu)",
        "drafter   demo: 83% of first drafts accepted in the self-test, 4.31 tokens per draft",
        "KV cache  43,664 tokens",
        "logs      /session/logs",
    ):
        assert words in block
    (command,) = [line.strip() for line in block.splitlines() if "curl" in line]
    words = shlex.split(command)
    assert words[2] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(words[-1])["model"] == "wingbeat-demo"
    assert "Bearer $WINGBEAT_API_KEY" in command
    assert "secret" not in shown


def test_the_last_block_says_that_no_text_is_the_models():
    facts = dict(ready_facts([REPORT | {"forced_acceptance": (1.0, 0.24)}], "/logs"))
    assert facts["acceptance"] == "forced to (1.0, 0.24): no text is the model's"
    assert "acceptance" not in dict(ready_facts([REPORT], "/logs"))


KILLED = (
    "Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node",
    "worker(s) were killed due to the node running low on memory. Refer to the documentation on how to address",
)
"""Text of a raylet that has killed processes for lack of memory, after their number."""
ENDED_ON_PURPOSE = (
    "0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed due to other reasons at node",
    "A worker died or was killed while executing a task by an unexpected system error. Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed",
)
"""Text of a raylet about processes that this application has ended."""


def test_lines_of_rays_processes_are_shown_where_they_are_ours(fake_ray, capsys):
    fake = fake_ray()
    fake.dispatcher.add_handler("ray_print_logs", lambda data: print("chatter", data))
    fake.signals = {("status", 4): signal.SIGTERM}
    ours = "INFO 2026-11-22 18:00:00,123 wingbeat.runtime.engine.memory: KV memory: 1 MiB [x]"
    warning = "WARNING 2026-11-22 18:00:00,123 wingbeat.deployments.app: The server listens on 0.0.0.0"
    serves = "INFO 2026-11-22 18:00:00,123 Verifier 12 -- CALL stats OK 1ms"

    def run(app: object, name: str) -> None:
        fake.applications[name] = SimpleNamespace(status=None, deployments={})
        fake.dispatcher.emit({"pid": 12, "is_err": True, "lines": [ours, serves, warning]})
        fake.dispatcher.emit(
            {"pid": "raylet", "is_err": True, "lines": ["8 PYTHON worker processes have been started"]}
        )
        fake.dispatcher.emit(
            {"pid": "raylet", "is_err": True, "lines": [*ENDED_ON_PURPOSE, *(f"2 {killed}" for killed in KILLED)]}
        )

    fake.run = run
    serve_until_stopped(AppConfig())
    shown = capsys.readouterr()
    assert "\nKV memory: 1 MiB [x]\n" in shown.out
    first, *others = shown.err.splitlines()
    assert first == "Warning: The server listens on 0.0.0.0"
    assert len(others) == len(KILLED)
    assert all(line.startswith("Error: Ray has killed 2 processes because the node's memory") for line in others)
    assert "chatter" not in shown.out
    assert "CALL" not in shown.out
    assert not fake.worker._worker_logs_enabled, "Ray prints its errors itself, not through the dispatcher"
