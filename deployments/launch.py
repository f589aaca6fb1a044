"""Starts the application on Ray, or reports in one line why the start is impossible. When the application is stopped,
the processes that were started here are ended.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import ray
from ray import serve
from ray._private import worker as ray_worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from wingbeat.cluster.channels.segment_files import remove_stale_segments
from wingbeat.cluster.process_tree import descendants, end
from wingbeat.deployments import ray_cluster
from wingbeat.deployments.app import ROUTER, build_at, verifier_names
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.host_names import url_of
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.deployments.replica.drafters.supervisor import root_cause
from wingbeat.deployments.replica.refused_start import refusal
from wingbeat.deployments.start_up import StartUp, curl_command, new_start_up, ready_facts
from wingbeat.deployments.start_watch import StartWatch
from wingbeat.deployments.stop_signals import StopSignals
from wingbeat.runtime.tokenizer_file import has_chat_template

logger = logging.getLogger(__name__)
APP_NAME = "wingbeat"
NICENESS = "RAY_worker_niceness"
"""Environment variable for the niceness of Ray's workers. At Ray's default of 15, the workers would get CPU time only
after all other processes.
"""
RAY_ENV = {
    NICENESS: "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    # Serve kills a proxy that is not ready after three times this period. On a busy machine, 3 * 5 s by Serve's default
    # is too short.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    **ray_cluster.PROXY_ENV,
}
"""Environment of a Ray cluster that is started here. Serve replaces a proxy after three failed checks, which would take
30 s at Serve's default period of 10 s. Each check may still take 10 s, because a proxy that is only slow must not be
replaced.
"""
POLL_S, START_POLL_S = 1.0, 0.2
"""Seconds between checks of the application's status, while it runs and while it starts."""
REPORT_TIMEOUT_S = 60.0
"""Maximum seconds to wait for a verifier replica's report, which is shown when the start has finished."""
DRAIN_MARGIN_S = 5.0
"""Routers must answer the drain call within `shutdown_timeout_s` plus this number of seconds."""
PROCESS_GRACE_S = 5.0
"""Seconds that processes have to end after `ray.shutdown` before they are killed."""


CTRL_C = "Ctrl-C ends the application."
DETACHED = f"The application keeps running after this command; serve.delete('{APP_NAME}') in Python ends it."


class StartError(RuntimeError):
    """The application could not start or has failed; the message is one line that names the cause."""


class ServedApplication:
    """An application on a Ray cluster that this process has started or joined.

    SIGINT and SIGTERM raise KeyboardInterrupt in the method that is running.

    Args:
        host: address to listen on.
        port: port to listen on.
        signals: handlers of SIGINT and SIGTERM; with None, signals are not handled.
        start_up: prints progress lines; with None, no progress is printed.
        address: address of a running cluster to which this machine belongs; with None, Ray decides whether to join a
            cluster.
        detach: whether the application keeps running when this process ends.
    """

    def __init__(
        self,
        config: AppConfig,
        host: str = "127.0.0.1",
        port: int = 8000,
        signals: StopSignals | None = None,
        start_up: StartUp | None = None,
        address: str | None = None,
        detach: bool = False,
    ) -> None:
        self._config = config
        self._address = address
        self._detach = detach
        self._start_up = start_up
        self._host, self._port = host, port
        self._signals = signals
        self._owns_ray = False
        self._guard: Any = None
        """Guard of the Ray cluster that this process has started, see the hook `guard_ray`."""
        self._door: Any = None
        """The router's own door, see the hook `open_door`; None if Serve's proxy listens."""
        self._deployed = False
        self._serving = False

    def start(self) -> None:
        """Starts Ray, Serve and the application; returns when the application answers requests.

        The workers of a Ray cluster started here run at normal priority, because the only purpose of the cluster is
        serving.

        Raises:
            StartError: the cluster has this application already, no node has the GPUs of a pair, or a replica could not
                start, for example because a checkpoint cannot be read.
        """
        wants_door = first_result("wants_door", self._config)
        for name, value in RAY_ENV.items():
            os.environ.setdefault(name, value)
        if not ray.is_initialized():
            self._connect()
        if self._detach and self._owns_ray:
            raise StartError("--detach needs a running cluster: give its --address, or run `ray start --head` first")
        if self._start_up is not None:
            _speak_for_ray(self._start_up)
        if wants_door and self._owns_ray:
            self._open_door()
            serve.start(proxy_location="Disabled")
        else:
            serve.start(http_options={"host": self._host, "port": self._port})
        if APP_NAME in serve.status().applications:
            raise StartError(
                f"this Ray cluster has an application named {APP_NAME} already: end it with `serve shutdown`, or unset "
                "RAY_ADDRESS to start a separate cluster"
            )
        self._take_gpus()
        self._deployed = True
        if self._start_up is not None:
            self._start_up.event("starting the router, the verifier and its drafter")
        door = None if self._door is None else self._door.key
        application = serve.RunTarget(build_at(self._config, door), APP_NAME)
        try:
            serve.run_many([application], wait_for_applications_running=False)
            self._wait_for_replicas()
        except StartError:
            raise
        except (RuntimeError, RayServeException) as error:
            raise StartError(_cause() or root_cause(error)) from None
        self._serving = True
        if self._start_up is not None:
            with nullcontext() if self._signals is None else self._signals.held():
                self._say_ready(self._start_up)

    def _wait_for_replicas(self) -> None:
        """Waits until the replicas have started.

        Serve's own function for waiting is not used: it would never return if no attempt can succeed, or if the
        application is deleted.
        """
        watch = StartWatch(self._say)
        while (application := serve.status().applications.get(APP_NAME)) is not None:
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartError(_cause() or root_cause(application.message))
            if application.status != ApplicationStatus.DEPLOYING:
                return
            problem = watch.look(application.deployments)
            if problem is not None:
                raise StartError(problem)
            if self._signals is not None:
                self._signals.check()
            time.sleep(START_POLL_S)
        raise StartError("the application was deleted while it was starting")

    def url(self) -> str:
        """URL of the router or of Serve's proxies. In a joined cluster, the proxies may listen on another host and port
        than `host` and `port`.
        """
        if self._door is not None:
            return url_of(self._host, self._port)
        http = _get_global_client().http_config
        return url_of(http.host, http.port)

    def wait(self) -> None:
        """Blocks until another process deletes the application.

        Raises:
            StartError: the deployment has failed and Serve will not retry.
        """
        while (application := serve.status().applications.get(APP_NAME)) is not None:
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartError(_cause() or application.message)
            if self._signals is not None:
                self._signals.check()
            time.sleep(POLL_S)
        self._serving = False

    def drain(self) -> None:
        """Makes the routers refuse new requests, and waits up to `shutdown_timeout_s` for running requests."""
        if not self._serving:
            return
        if self._door is not None:
            self._door.close()
        timeout_s = self._config.shutdown_timeout_s
        print(f"Stopping: running requests have {timeout_s:g} s; a second signal ends them now.", flush=True)
        drained = serve.get_deployment_handle(ROUTER, APP_NAME).broadcast("drain", timeout_s)
        try:
            drained.results(timeout_s=timeout_s + DRAIN_MARGIN_S)
        except (RayError, RayServeException, TimeoutError, RuntimeError) as error:
            logger.warning("Not every router has drained: %s", root_cause(error))

    def close(self) -> None:
        """Stops the application, then Ray if this process has started it."""
        if self._guard is not None:
            self._guard.stand_down()
        if self._door is not None:
            self._door.close()
        if self._owns_ray:
            own = None if self._guard is None else self._guard.pid
            processes = [process for process in descendants(os.getpid()) if process.pid != own]
            if ray.is_initialized():  # without a Ray cluster, Serve's calls would start one
                serve.shutdown()
            ray.shutdown()
            end(processes, PROCESS_GRACE_S)
            remove_stale_segments()
            if self._guard is not None:
                self._guard.close()
        elif self._deployed:
            serve.delete(APP_NAME)

    def kill(self, code: int) -> NoReturn:
        """Ends this process at once, with all processes of the Ray cluster that it has started.

        If it has joined a cluster, Serve ends the replicas.
        """
        if self._guard is not None:
            self._guard.stand_down()
        if self._owns_ray:
            end(descendants(os.getpid()), 0.0)
            end(descendants(os.getpid()), 0.0)  # ends processes that were started during the first call
            remove_stale_segments()
        elif self._deployed:
            serve.delete(APP_NAME, _blocking=False)
        sys.stdout.flush()
        sys.stderr.flush()
        # `os._exit` skips Ray's exit hooks, which would wait for the killed processes.
        os._exit(code)

    def _say(self, text: str) -> None:
        if self._start_up is not None:
            self._start_up.event(text)

    def _say_ready(self, start_up: StartUp) -> None:
        config = self._config
        handles = [serve.get_deployment_handle(name, APP_NAME) for name in verifier_names(config)]
        reports = [handle.report.remote().result(timeout_s=REPORT_TIMEOUT_S) for handle in handles]
        logs = f"{ray_worker._global_node.get_session_dir_path()}/logs"
        first = config.served()[0]
        # For the demo model, the example command requests a completion: the model has a chat template, but is trained
        # only to complete Python code.
        own = first.model is not None
        chats = own and (first.own_template() is not None or has_chat_template(first.model_dir(with_weights=False)))
        command = curl_command(self.url(), first.model_name(), bool(config.api_key), chats)
        start_up.ready(f"{self.url()}/v1", ready_facts(reports, logs), command, DETACHED if self._detach else CTRL_C)

    def _open_door(self) -> None:
        try:
            self._door = first_result("open_door", self._host, self._port)
        except ValueError as error:
            raise StartError(str(error)) from None

    def _connect(self) -> None:
        self._owns_ray = True  # set first, so that Ray is ended if a signal arrives during its start
        try:
            ray_cluster.connect(self._address, self._say)
        except ray_cluster.ClusterError as error:
            raise StartError(str(error)) from None
        finally:
            if self._signals is not None:
                self._signals.install()
        self._owns_ray = ray_worker._global_node.is_head()
        if self._owns_ray:
            node = ray_worker._global_node
            self._guard = first_result("guard_ray", node.get_session_dir_path(), node.all_processes)

    def _take_gpus(self) -> None:
        try:
            for take_gpus in hooks("take_gpus"):
                self._config = take_gpus(self._config, True, self._say)
            for check_in_cluster in hooks("check_in_cluster"):
                check_in_cluster(self._config)
        except ValueError as error:
            raise StartError(str(error)) from None


def serve_until_stopped(
    config: AppConfig,
    host: str = "127.0.0.1",
    port: int = 8000,
    start_up: StartUp | None = None,
    address: str | None = None,
    detach: bool = False,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. A second signal exits at once, with code 128 + its number.

    With `detach`, the function returns as soon as requests are answered, and leaves the application running in the
    cluster.

    Raises:
        StartError: the application could not start, or has failed and Serve will not retry.
    """
    signals = StopSignals()
    start_up = new_start_up() if start_up is None else start_up
    application = ServedApplication(config, host, port, signals, start_up, address, detach)
    signals.install()
    try:
        try:
            application.start()
            if detach:
                return
            application.wait()
        except KeyboardInterrupt:
            application.drain()
        except BaseException:
            application.close()
            raise
        application.close()
    except KeyboardInterrupt:
        signals.ignore()
        application.kill(signals.exit_code())
    finally:
        # Progress lines are stopped here, so that no progress line is printed after the error of a failed start.
        start_up.close()


def _speak_for_ray(start_up: StartUp) -> None:
    """Passes the log lines of Ray's workers to `start_up`, which chooses the lines to print. In this process, Serve's
    logger writes only errors.
    """
    # drops the messages that the raylet sends to all drivers, for example at the end of each actor
    ray_worker._worker_logs_enabled = False
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    global_worker_stdstream_dispatcher.add_handler("wingbeat", start_up.worker_lines)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _deployments() -> Mapping[str, Any]:
    """Returns Serve's status of the application's deployments, by name."""
    application = serve.status().applications.get(APP_NAME)
    return {} if application is None else application.deployments


def _cause() -> str | None:
    """Returns the cause that the first failed deployment reports, in one line; None if no deployment has failed."""
    deployments = _deployments().values()
    failed = [deployment.message for deployment in deployments if deployment.status.value == "DEPLOY_FAILED"]
    return (refusal(failed[0]) or root_cause(failed[0])) if failed else None
