"""Fakes of Ray and Serve for `launch`: record every call, and signal this process on request."""

import os
import signal
from types import SimpleNamespace

from ray import serve
from ray._private.ray_logging import WorkerStandardStreamDispatcher

REPORT = {
    "model": "wingbeat-demo",
    "drafter": "demo",
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 2048,
    "num_kv_tokens": 43664,
    "forced_acceptance": None,
    "self_test": {"first_position": 0.8312, "acceptance_length": 4.314},
}


class FakeRay:
    """Fakes of Ray and Serve for `launch`: record every call, and signal this process on request."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *, attached: bool = False, applications: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.initialized = False
        self.applications = {name: SimpleNamespace(status=None, deployments={}) for name in applications}
        self.signals: dict[tuple[str, int], int] = {}
        """By the call in which they come, and how many of its name there have been with it."""
        self.drain_timeouts: list[float] = []
        self.dispatcher = WorkerStandardStreamDispatcher()
        self.listens = SimpleNamespace(host="127.0.0.1", port=8000)
        self.head: dict[str, list[SimpleNamespace]] = {}
        """Processes of Ray's own, by its names."""
        node = SimpleNamespace(
            is_head=lambda: not attached, get_session_dir_path=lambda: "/session", all_processes=self.head
        )
        """All resources of each."""
        self.worker = SimpleNamespace(_global_node=node, _worker_logs_enabled=True)

    def note(self, call: str) -> None:
        self.calls.append(call)
        number = self.signals.get((call, self.calls.count(call)))
        if number is not None:
            os.kill(os.getpid(), number)

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: object) -> None:
        self.initialized = True
        self.address = options["address"]
        # As Ray does, whoever else has handlers.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(99))

    def start(self, **options: object) -> None:
        self.options = options
        self.note("start")

    def status(self) -> SimpleNamespace:
        self.note("status")
        return SimpleNamespace(applications=self.applications)

    RunTarget = serve.RunTarget

    def run_many(self, targets: list[serve.RunTarget], **options: object) -> None:
        (target,) = targets
        self.run(target.target, target.name)

    def run(self, app: object, name: str) -> None:
        self.application = app
        self.applications[name] = SimpleNamespace(status=None, deployments={})
        self.note("run")

    def delete(self, name: str, _blocking: bool = True) -> None:
        self.note(f"delete {name}")

    def shutdown(self) -> None:
        self.note("shutdown")

    def get_deployment_handle(self, deployment: str, app: str) -> SimpleNamespace:
        report = SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: REPORT))
        return SimpleNamespace(broadcast=self._broadcast, report=report)

    def _broadcast(self, method: str, timeout_s: float) -> SimpleNamespace:
        self.drain_timeouts.append(timeout_s)
        return SimpleNamespace(results=lambda timeout_s: self.note(method))
