"""Starts the application on this machine's Ray, or says in one line why it cannot."""

import os
import time

from ray import serve
from ray.serve.schema import ApplicationStatus

from wingbeat.cluster.placement import Share, check_node_gpus, node_gpus
from wingbeat.deployments.app import build
from wingbeat.deployments.config import AppConfig
from wingbeat.deployments.drafter_supervisor import root_cause

APP_NAME = "wingbeat"
NICENESS = "RAY_worker_niceness"
"""Ray's workers yield to all else on their machine (nice 15) unless the Ray that starts them is told otherwise."""
POLL_S = 1.0


class StartError(RuntimeError):
    """The application could not start; one line that names the cause."""


def launch(config: AppConfig, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Start Ray Serve's proxy and the application; returns when it answers requests.

    A Ray that is started for it runs its workers at normal priority: serving is what they are for.

    Raises:
        StartError: no node has the GPUs of a pair, or a replica could not start, such as for a checkpoint that cannot
            be read.
    """
    os.environ.setdefault(NICENESS, "0")
    serve.start(http_options={"host": host, "port": port})
    if config.resolved_device() == "cuda":
        _check_gpus(config)
    try:
        serve.run(build(config), name=APP_NAME)
    except RuntimeError as error:
        raise StartError(_cause() or root_cause(error)) from None


def _check_gpus(config: AppConfig) -> None:
    verifier = Share(config.num_cpus_per_verifier, config.num_gpus_per_verifier)
    drafter = Share(config.num_cpus_per_drafter, config.num_gpus_per_drafter) if config.has_drafter() else None
    try:
        check_node_gpus(verifier, drafter, node_gpus())
    except ValueError as error:
        raise StartError(str(error)) from None


def wait() -> None:
    """Block until the application is taken down.

    Raises:
        StartError: it failed for good.
    """
    while (application := serve.status().applications.get(APP_NAME)) is not None:
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise StartError(_cause() or application.message)
        time.sleep(POLL_S)


def _cause() -> str | None:
    """What the first failed deployment says about itself."""
    application = serve.status().applications.get(APP_NAME)
    deployments = [] if application is None else application.deployments.values()
    failed = [deployment.message for deployment in deployments if deployment.status.value == "DEPLOY_FAILED"]
    return root_cause(failed[0]) if failed else None
