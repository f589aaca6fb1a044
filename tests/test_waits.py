"""No process waits for another one without a limit, but where it would be told of the other's end."""

import importlib
import re

import pytest

from tests.optional import belongs_to_deleted
from tests.waits import ROOT, Wait, in_source, unbounded
from wingbeat.deployments.app_config import AppConfig

OWN_FINISHED = "it has ended already"
OF_THE_ENGINE = "within a piece of the engine's work, which its replica watches (`EngineWatch`)"
OF_THE_DEVICE = "for the device, within a round, which the replica watches (`EngineWatch`)"
NON_BLOCKING = "the socket does not block"
ALLOWED = {
    ("cluster/channels/tcp/remote_connection.py", "self._sock.recv_into"): NON_BLOCKING,
    ("cluster/channels/tcp/remote_connection.py", "self._changed.wait_for"): "a thread of this process, until `close`",
    ("cluster/channels/tcp/remote_handshake.py", "wire.recv_bytes"): "the socket is hung up after HANDSHAKE_S",
    ("cluster/channels/tcp/remote_channel.py", "self._sock.accept"): "a thread of this process, until `close`",
    ("cluster/child_process.py", "ended.wait"): "for the end of a process, by its pidfd",
    ("cluster/child_process.py", "self._process.wait"): "for the end of a process; its killer does not wait here",
    ("cluster/fork_server.py", "self._control.recv"): "settimeout when it is made: FORK_S",
    ("cluster/fork_server.py", "control.recv"): "the kernel ends the server with the process that asks",
    ("cluster/fork_server.py", "socket.recv_fds"): "the kernel ends the server with the process that asks",
    ("deployments/api/answers/answering.py", "asyncio.wait"): "for a request, or its client's leaving",
    ("deployments/api/answers/answering.py", "task.result"): OWN_FINISHED,
    ("deployments/embeddings/answer.py", "task.result"): OWN_FINISHED,
    ("deployments/api/bodies/unserved_fields.py", "_CURRENT.get"): "a context variable",
    ("deployments/api/answers/merging.py", "arrivals.get"): "for choices of a request, each of which ends by a word",
    ("deployments/bench/comparison.py", "*.result"): "the pool tells of its process's end",
    ("deployments/front_door/door.py", "socket.recv_fds"): "settimeout before each call",
    ("deployments/fleet/admission.py", "self._over.wait"): "a task that is waited for with a limit",
    ("deployments/fleet/connection.py", "asyncio.wait"): "signs of life, CALL_S each, end the connection",
    ("deployments/fleet/request_stream.py", "self._ready.wait"): "for tokens; the end of its connection ends it",
    ("deployments/fleet/serve_engines.py", "await *"): "`PatientEngines` or its caller has the limit",
    ("deployments/front_door/http_server.py", "await self._serving"): OWN_FINISHED,
    ("deployments/front_door/http_server.py", "asyncio.wait"): "uvicorn ends at timeout_graceful_shutdown",
    ("deployments/launch.py", "application.wait"): "until a signal; it looks at the application all the time",
    ("deployments/replica/drafters/drafter_actor.py", "self.drafter.connection.recv"): "behind `poll` with a limit",
    ("deployments/replica/drafters/drafter_calls.py", "connection.recv"): "the kernel ends it with its fork server",
    ("deployments/shared_drafters/pool_drafter.py", "await *"): "CANDIDATES_S, where it is called",
    ("deployments/shared_drafters/pool_member.py", "asking.result"): OWN_FINISHED,
    ("deployments/shared_drafters/shared_drafter.py", "await self._actor.status.remote"): "FIRST_S and PATIENCE_S "
    "of `PoolMember`",
    ("deployments/replica/engine/engine_loop.py", "done.result"): OWN_FINISHED,
    ("deployments/replica/engine/engine_loop.py", "grammar.result"): OWN_FINISHED,
    ("deployments/replica/engine_client.py", "await self._started"): "engine_start_timeout_s, in `EngineLife.start`",
    ("deployments/replica/engine_client.py", "self._lost.wait"): "for the end of a process, by its pidfd",
    ("deployments/replica/engine_life.py", "self._process.wait"): "for the end of a process, by its pidfd",
    ("deployments/replica/engine_supervisor.py", "self._changed.wait"): "for an engine; each start has a limit",
    ("deployments/weights/changing_supervisor.py", "await change.done"): "for an engine; each start has a limit",
    ("deployments/learning/learner_host.py", "self._child.wait"): "for the end of a process, by its pidfd",
    ("deployments/ranks/ray_ranks.py", "asyncio.wait"): "for the end of a rank, which Ray tells",
    ("deployments/ranks/ray_ranks.py", "end.result"): OWN_FINISHED,
    ("deployments/ranks/ray_ranks.py", "await self._*"): "for the end of a rank, which Ray tells",
    ("deployments/replica/router_stream.py", "self._ready.wait"): "for tokens; the end of the engine ends it",
    ("deployments/request_context.py", "_CURRENT.get"): "a context variable",
    ("deployments/round_traces/part.py", "await events"): "`chrome_trace` limits the recording: LATE_S",
    ("deployments/ray_guard/watchdog.py", "self._process.wait"): "it has been killed",
    ("runtime/engine/engine.py", "*.wait"): OF_THE_DEVICE,
    ("runtime/shown_rounds/shown_rounds.py", "*.wait"): OF_THE_DEVICE,
    ("runtime/grammar/trial.py", "process.wait"): "it has been killed",
    ("runtime/grammar/worker.py", "socket.recv_fds"): "ends with the other end of the socket",
    ("runtime/prefixes/prefix_keeper.py", "done.result"): OWN_FINISHED,
    ("runtime/recordings/live.py", "*.wait"): OF_THE_DEVICE,
    ("runtime/fused/layers.py", "*.join"): "joins tensors",
    ("runtime/fused/attention.py", "*.join"): "joins tensors",
    ("runtime/latent_attention/half.py", "*.join"): "joins tensors",
    ("runtime/masks/allowed_tokens.py", "sent.trees.wait"): OF_THE_DEVICE,
    ("runtime/round/flight.py", "*.wait"): OF_THE_DEVICE,
    ("runtime/round/eager_rounds.py", "masks.result"): OF_THE_ENGINE,
}
"""By file and call, why it may be without a limit."""


def allowed(one: Wait) -> tuple[str, str] | None:
    """The key of ALLOWED that a call falls under; a name that ends by `*`, or begins by it, stands for several."""
    for path, name in ALLOWED:
        same = one.call.startswith(name[:-1]) if name.endswith("*") else one.call.endswith(name.removeprefix("*"))
        if path == one.path and (same if "*" in name else one.call == name):
            return path, name
    return None


def test_every_wait_has_a_limit_or_a_reason_to_have_none_and_no_reason_is_left_over():
    found = unbounded()
    wrong = [f"{one.path}:{one.line} {one.call}" for one in found if allowed(one) is None]
    assert not wrong, "give each a timeout, or say in ALLOWED why it needs none"
    rows = {row for row in ALLOWED if not belongs_to_deleted(row[0])}
    assert rows == {allowed(one) for one in found}


@pytest.mark.parametrize(
    "call",
    [
        *["event.wait()", "thread.join()", "jobs.get()", "future.result()", "lock.acquire()", "link.wait(None)"],
        *["process.communicate()", "poll.poll(None)", "selector.select()", "sock.recv(1)", "sock.accept()"],
        *["ray.get(ref)", "asyncio.wait(tasks)", "asyncio.wait(tasks, timeout=None)", "subprocess.run(command)"],
        *["fcntl.flock(fd, fcntl.LOCK_EX)", "condition.wait_for(ready)"],
    ],
)
def test_a_wait_without_a_limit_is_found(call: str):
    assert [one.call for one in in_source(call, "a.py")]


@pytest.mark.parametrize(
    "call",
    [
        *["event.wait(1.0)", "thread.join(limit_s)", "jobs.get(timeout=wait_s)", "future.result(timeout_s=5)"],
        *[
            "', '.join(words)",
            "fields.get('name')",
            "poll.poll(5)",
            "ray.get(ref, timeout=3)",
            "blocks.acquire(cached)",
        ],
        *["asyncio.wait(tasks, timeout=1)", "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)"],
    ],
)
def test_one_with_a_limit_is_not(call: str):
    assert in_source(call, "a.py") == []


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("await actor.call.remote()", True),
        ("await call_apart(handle.submit)", True),
        ("await future", True),
        ("await self._started", True),
        ("async with asyncio.timeout(5):\n  await future", False),
        ("await asyncio.wait_for(actor.call.remote(), 5)", False),
        ("await asyncio.sleep(5)", False),
    ],
)
def test_what_is_awaited_needs_a_limit_around_it(body: str, is_found: bool):
    indented = "\n".join(f" {line}" for line in body.splitlines())
    assert bool(in_source(f"async def f():\n{indented}", "a.py")) == is_found


OF_A_FILE = re.compile(r"`([\w/]+\.py): (\w+)` (\d+(?:\.\d+)?)")
OF_A_SETTING = re.compile(r"`(\w+_s)` (\d+(?:\.\d+)?)")


def limits_in_the_docs() -> list[str]:
    """By row of the table of `docs/operations.md`, its limits."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = text.partition("### Time limits")[2].partition("\n|")[2].partition("\n\n")[0]
    return [line.split("|")[3] for line in table.splitlines()[2:]]


def test_the_limits_in_the_docs_are_those_of_the_code():
    config = AppConfig()
    found = limits_in_the_docs()
    assert len(found) > 12
    for limit in found:
        constants, settings = OF_A_FILE.findall(limit), OF_A_SETTING.findall(limit)
        assert constants or settings, limit
        for path, name, value in (one for one in constants if not belongs_to_deleted(one[0])):
            module = importlib.import_module("wingbeat." + path.removesuffix(".py").replace("/", "."))
            assert getattr(module, name) == float(value), limit
        for name, value in settings:
            real = config.stuck_after_s() if name == "engine_stuck_after_s" else getattr(config, name)
            assert real == float(value), limit
