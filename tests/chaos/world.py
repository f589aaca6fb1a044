"""An application under load, whose every answer is known, and what an act does to it."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.serve.exceptions import RayServeException

from benchmarks.steady_load import Answer, SteadyLoad, compare, mixed_bodies
from tests.chaos import processes
from tests.chaos.acts import ACTS, Act
from tests.chaos.idle import IdleConnections
from tests.chaos.scenarios import Scenario
from tests.conftest import MODEL, App
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.process_tree import descendants
from wingbeat.deployments.replica.engine_client import EngineFailed

NUM_BODIES = 18
TOKENS = 96
LONG_TOKENS = 240
NUM_LONG = 4
RECOVERY_S = 180.0
"""On a machine that does much else; how long things take is not the question here."""
QUIET_S = 30.0
REPEAT_S = 120.0
POLL_S = 0.25
PREEMPTION = 2
"""Ray's number of the reason that the machine goes at the deadline."""
MOVED = ("router", "verifier")
"""Replicas that Serve starts elsewhere before it ends those of a node that is drained."""
NOT_YET = (ray.exceptions.RayError, RayServeException, EngineFailed, TimeoutError, httpx.HTTPError, KeyError)
"""Errors of calls while a process is being replaced."""


class World:
    """A running scenario."""

    def __init__(self, scenario: Scenario, app: App, url: str, cluster: Cluster, nodes: dict[str, Any]) -> None:
        self._scenario = scenario
        self._app = app
        self._url = url
        self._cluster = cluster
        self._nodes = nodes
        prompts = [f"def function_{index}(self, name):\n    " * (1 + index % 4) for index in range(NUM_BODIES)]
        self._bodies = mixed_bodies(prompts, TOKENS, MODEL)
        long = {"model": MODEL, "max_tokens": LONG_TOKENS, "ignore_eos": True, "n": 1, "stream": True}
        self._long_bodies = [
            {**long, "prompt": f"class Long{index}:\n    ", "temperature": 0.8 * (index % 2), "seed": index}
            for index in range(NUM_LONG)
        ]
        self._victim = ""
        self._loads: list[_Running] = []
        self._until(self._is_whole, RECOVERY_S)
        self._answers = self._plain_answers(self._bodies)
        needs_long = "exhaust KV" in scenario.acts
        self._long_answers = self._plain_answers(self._long_bodies) if needs_long else {}

    def play(self, name: str) -> dict[str, Any]:
        """Play an act; returns lists that must be empty, and figures."""
        act = ACTS[name]
        before, num_segments = processes.found(), len(_segments())
        concurrency = 2 + 4 * self._scenario.num_engines
        idle = IdleConnections(self._url)
        load = self._begin(self._bodies, self._answers, concurrency, act)
        self._until(lambda: all(engine["num_running"] for engine in self._app.engines().values()), RECOVERY_S)
        # An engine that the previous act ended may be listed a moment longer.
        self._victim = min(name for name, engine in self._engines().items() if processes.exists(engine["pid"]))
        began, under_way = time.perf_counter(), load.num_under_way
        noticed = act.do(self)
        back = self._until(lambda: noticed() and self._is_whole(before), RECOVERY_S)
        seconds = time.perf_counter() - began
        idle.close()
        outcomes = [load.end() for load in self._loads]
        self._loads.clear()
        leaks: list[str] = []
        if back:
            self._until(lambda: not self._leaks(before, num_segments), QUIET_S)
            leaks = self._leaks(before, num_segments)
        return {
            "failures": [one for outcome in outcomes for one in outcome.failures],
            "differences": [one for outcome in outcomes for one in outcome.differences],
            "leaks": leaks,
            "not back": [] if back else [repr(self._seen())],
            "num_requests": sum(outcome.num_requests for outcome in outcomes),
            "num_under_way": under_way,
            "seconds": round(seconds, 1),
        }

    def shut_down(self) -> dict[str, Any]:
        """Delete the application; returns what is left of it."""
        serve.delete(self._app.name)
        self._until(lambda: not self._left(), QUIET_S)
        return {"leaks": self._left()}

    def engine(self, field: str) -> Any:
        """A figure of the engine that the act is about."""
        return self._engines()[self._victim][field]

    def num_preemptions(self) -> int:
        """Preemptions of all engines."""
        return sum(engine["num_preemptions"] for engine in self._engines().values())

    def begin_burst(self, num_clients: int) -> None:
        """Clients with long requests, until the act is over."""
        self._begin(self._long_bodies, self._long_answers, num_clients, ACTS["exhaust KV"])

    def replace_node(self, name: str) -> list[int]:
        """Take a node away from one moment to the next, and bring another one; the processes that were on it."""
        there = self._remove(name)
        self._nodes[name] = add_node(self._cluster, self._scenario, name)
        return there

    def lose_shared_drafter(self, silently: bool) -> list[int]:
        """Take away a drafter's node, and bring another one only when every verifier drafts by a drafter that is left;
        the processes that were on it.

        Args:
            silently: its processes stop before they end, and no connection of theirs is closed.
        """
        assert self._until(self._have_a_drafter_each, RECOVERY_S), "the verifiers share one drafter, and one is idle"
        name, there = self._drafters_node()
        if silently:
            for pid in there:
                processes.send(pid, signal.SIGSTOP)
            assert self._until(lambda: self._draft_elsewhere(there), RECOVERY_S), "the frozen drafter is waited for"
        self._remove(name)
        for pid in there if silently else []:  # stopped processes do not see the end of their node
            if processes.exists(pid):
                processes.send(pid, signal.SIGKILL)
        assert self._until(lambda: self._draft_elsewhere(there), RECOVERY_S), "no other drafter is found"
        self._nodes[name] = add_node(self._cluster, self._scenario, name)
        return there

    def _drafters_node(self) -> tuple[str, list[int]]:
        """The name of a node that has a drafter, and its processes."""
        by_node, drafters = {name: self._below(name) for name in self._nodes}, {*processes.pids("drafter")}
        return next((name, there) for name, there in by_node.items() if drafters & {*there})

    def _have_a_drafter_each(self) -> bool:
        return len({engine["drafter_pid"] for engine in self._engines().values()}) == self._scenario.num_engines

    def _draft_elsewhere(self, there: list[int]) -> bool:
        engines = self._engines().values()
        return all(one["drafter_state"] == "attached" and one["drafter_pid"] not in there for one in engines)

    def _remove(self, name: str) -> list[int]:
        there = self._below(name)
        self._cluster.remove_node(self._nodes[name], allow_graceful=False)
        return there

    def drain_node(self, name: str) -> list[int]:
        """Bring another node, and have Ray empty the old one, which then goes; the processes that were on it."""
        node, there = self._nodes[name], self._below(name)
        replicas = [one.pid for one in processes.found() if one.kind in MOVED and one.pid in there]
        assert replicas, f"no replica is on the node {name}"
        self._nodes[name] = add_node(self._cluster, self._scenario, name)
        deadline_ms = int(1e3 * (time.time() + RECOVERY_S))
        gcs = GcsClient(address=self._cluster.address)
        accepted, why = gcs.drain_node(node.node_id, PREEMPTION, "it is to go", deadline_ms)
        assert accepted, why
        assert self._until(lambda: not any(map(processes.exists, replicas)), RECOVERY_S), "its replicas have not moved"
        self._cluster.remove_node(node)
        return there

    def _below(self, name: str) -> list[int]:
        (raylet,) = self._nodes[name].all_processes["raylet"]
        return [raylet.process.pid, *(process.pid for process in descendants(raylet.process.pid))]

    def _plain_answers(self, bodies: list[dict[str, Any]]) -> dict[int, Answer]:
        """Undisturbed, and without speculation."""
        plain = [{**body, "speculation": {"enabled": False}} for body in bodies]
        load = SteadyLoad(self._url, plain, concurrency=4)
        running = _Running(load, {}, self._loads)
        self._until(lambda: sum(trace.ended_s is not None for trace in load.traces) >= len(plain), RECOVERY_S)
        self._loads.clear()
        running.join()
        assert all(trace.failure is None for trace in load.traces), [trace.failure for trace in load.traces]
        return {trace.number: trace.answer for trace in load.traces}

    def _begin(self, bodies: list[dict], answers: dict[int, Answer], num_clients: int, act: Act) -> "_Running":
        repeat_s = REPEAT_S if act.breaks_connections else 0.0
        return _Running(SteadyLoad(self._url, bodies, num_clients, repeat_s), answers, self._loads)

    def _engines(self) -> dict[str, dict[str, Any]]:
        return self._app.engines()

    def _is_whole(self, before: list[processes.Found] | None = None) -> bool:
        """Whether everything there shall be is there and serves, with as many processes as before."""
        engines = self._engines()
        deployments = serve.status().applications[self._app.name].deployments
        return (
            len(engines) == self._scenario.num_engines
            and all(engine["drafter_state"] == "attached" for engine in engines.values())
            and all(processes.exists(engine["drafter_pid"]) for engine in engines.values())
            and all(set(one.replica_states) == {"RUNNING"} for one in deployments.values())
            and (before is None or processes.counts(before) == processes.counts(processes.found()))
            and self._app.http.get("/health").status_code == 200
        )

    def _seen(self) -> dict[str, Any]:
        """For a person who wonders why something did not come back."""
        try:
            return {"engines": self._engines(), "processes": [one[:3] for one in processes.found()]}
        except NOT_YET as error:
            return {"error": str(error), "processes": [one[:3] for one in processes.found()]}

    def _leaks(self, before: list[processes.Found], num_segments: int) -> list[str]:
        """Leaks of an application without requests."""
        problems = processes.leaks(before, processes.found())
        if len(segments := _segments()) != num_segments:
            problems.append(f"segments {segments}, not {num_segments}")
        handle = serve.get_deployment_handle("Verifier", self._app.name)
        for engine_id, engine in self._engines().items():
            if engine["num_requests"] or engine["num_free_blocks"] != engine["num_blocks"] - 1:  # block 0 is padding's
                problems.append(f"{engine['num_requests']} requests, {engine['num_free_blocks']} free blocks")
            handle.check_integrity.remote(engine_id=engine_id).result(timeout_s=60)
        return problems

    def _left(self) -> list[str]:
        ended = [f"{one.kind} {one.pid}" for one in processes.found() if one.kind not in ("proxy", "controller")]
        return ended + _segments()

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether the condition has come true in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if condition():
                    return True
            except NOT_YET:
                pass
            time.sleep(POLL_S)
        return False


class _Running:
    """A load on a thread of its own."""

    def __init__(self, load: SteadyLoad, answers: dict[int, Answer], running: list["_Running"]) -> None:
        self._load = load
        self._answers = answers
        self._thread = threading.Thread(target=lambda: asyncio.run(load.run()), daemon=True)
        self._thread.start()
        running.append(self)

    @property
    def num_under_way(self) -> int:
        return sum(trace.ended_s is None for trace in self._load.traces)

    def join(self) -> None:
        self._load.stop()
        self._thread.join(RECOVERY_S)
        assert not self._thread.is_alive(), "requests have not ended"

    def end(self) -> Any:
        """Send no more, and hold every answer against the one that it should be."""
        self.join()
        return compare(self._load.traces, self._answers)


def add_node(cluster: Cluster, scenario: Scenario, name: str) -> Any:
    """Add a node of the scenario to the cluster."""
    node = scenario.nodes[name]
    added = cluster.add_node(num_cpus=node.num_cpus, resources=node.resources, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    return added


def _segments() -> list[str]:
    return sorted(path.name for path in Path(SHM_DIR).glob(f"{PREFIX}*"))
