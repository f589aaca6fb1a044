"""Connects to Ray: joins a running cluster that answers, or starts one."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import grpc
import ray
from ray._private import services
from ray._private.node import Node
from ray._raylet import GcsClient
from ray.job_config import JobConfig

from wingbeat.cluster.process_tree import descendants, end
from wingbeat.deployments.replica.drafters.supervisor import root_cause

JOIN_S = 5.0
"""Seconds for a cluster to answer; Ray itself would wait for minutes."""
LOCAL = "local"
"""Ray's address word for starting a cluster of one's own."""
PROXY_ENV = {"no_grpc_proxy": "0.0.0.0/0,::/0,localhost"}
"""Environment that turns off proxies for gRPC only: Serve calls replicas by gRPC at their nodes' addresses, which a
proxy (http_proxy) cannot reach. Downloads from the hub still use the proxy.
"""
NODE_S = 180
"""Seconds for the processes of a Ray started here to register."""
SOON_S, LOOK_S = 5.0, 0.02
"""Seconds in which a new node usually registers, and between two looks during that time; later Ray's own polling
does.
"""
PROCESS_GRACE_S = 5.0
"""Seconds for the processes of a failed start of Ray to end by themselves."""
ADVICE = (
    "the machine may be too busy or out of memory: end other work, or start Ray separately with `ray start --head`, "
    "and try again"
)
_HEALTH = "/grpc.health.v1.Health/Check"


class ClusterError(RuntimeError):
    """No Ray cluster can be used; one line that says what to change."""


def connect(address: str | None, say: Callable[[str], None]) -> None:
    """Joins the cluster at an address, or starts one; a failed start is tried a second time.

    Args:
        address: as in `address_to_join`.
        say: shows one line.

    Raises:
        ClusterError: no cluster answers, or Ray does not start.
        KeyboardInterrupt: a signal arrived meanwhile.
    """
    found = address_to_join(address)
    why = _why_down(LOCAL if found == LOCAL else address)
    if why is None:
        return
    if found != LOCAL:
        raise ClusterError(f"the Ray cluster at {found} cannot be joined: {why}")
    # Ray's own time limits of a minute are too short on a machine whose CPUs are busy.
    say(f"starting Ray once more: {why}")
    end(descendants(os.getpid()), PROCESS_GRACE_S)
    why = _why_down(LOCAL)
    if why is not None:
        raise ClusterError(f"Ray cannot start, in two attempts: {why}; {ADVICE}")


def _why_down(address: str | None) -> str | None:
    """Starts or joins Ray; returns in one line why that failed, or None."""
    try:
        with head_for_serving():
            ray.init(
                address=address,
                namespace="serve",
                logging_level=logging.ERROR,
                include_dashboard=False,
                job_config=_OwnPaths(),
            )
    except SystemExit:  # raised by the signal handler that ray.init installs while it runs
        raise KeyboardInterrupt from None
    except Exception as error:  # Ray raises no narrower class if a node does not start
        ray.shutdown()
        return root_cause(error)
    return None


class _OwnPaths(JobConfig):
    """Job settings that keep the working directory, a possibly untrusted checkpoint, off workers' import paths."""

    def _runtime_env_has_working_dir(self) -> bool:
        """Returns True: Ray adds the working directory to import paths only if no working directory was packed."""
        return True


@contextlib.contextmanager
def head_for_serving() -> Iterator[None]:
    """Makes `ray.init` start a head without dashboard and autoscaler monitor, and wait longer for slow processes.

    `ray.init` has no such arguments. Even without its pages, Ray's dashboard takes seconds, 75 MB and a port to count
    usage; the autoscaler's monitor takes 50 MB to look for machines to start. Users who want them start a cluster with
    `ray start` and serve in it.
    """
    spare = [name for name in ("start_api_server", "start_monitor") if hasattr(Node, name)]
    with contextlib.ExitStack() as stack:
        for name in spare:
            stack.enter_context(mock.patch.object(Node, name, _nothing))
        stack.enter_context(mock.patch.object(services, "get_node", _looked_up_soon(services.get_node)))
        # Ray has no setting for this timeout of 60 s, which a raylet on a busy machine exceeds.
        stack.enter_context(mock.patch.object(services.wait_for_node, "__defaults__", (NODE_S,)))
        yield


def _looked_up_soon(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Wraps Ray's `get_node` with faster polling at first: Ray itself looks once a second."""

    def registered(gcs_address: str, node_id: str) -> Any:
        client, until = GcsClient(address=gcs_address), time.monotonic() + SOON_S
        while time.monotonic() < until:
            if node_id in {node.hex() for node in client.get_all_node_info(timeout=JOIN_S)}:
                break
            time.sleep(LOOK_S)
        return get_node(gcs_address, node_id)

    return registered


def _nothing(*arguments: object, **options: object) -> None:
    """Replaces methods of Ray's `Node` that start a process."""


def address_to_join(address: str | None) -> str:
    """Returns the address of the running cluster that Ray would join, or `local` if Ray would start its own.

    Args:
        address: HOST:PORT or `auto`. None takes RAY_ADDRESS, else a cluster that `ray start` has started here.

    Raises:
        ClusterError: a named address has no cluster that answers.
    """
    named = address or os.environ.get("RAY_ADDRESS")
    source = f"--address {address}" if address else f"RAY_ADDRESS={named}"
    if named == LOCAL:
        return LOCAL
    try:
        found = services.canonicalize_bootstrap_address(named)
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterError(f"{source}: no Ray cluster is there ({error}); {_remedy(address)}") from None
    if found is None:
        return LOCAL
    why = _why_silent(found)
    if why is None:
        return found
    if named is None:
        return LOCAL  # the address comes from the file that `ray start` leaves behind when its cluster is killed
    raise ClusterError(f"{source}: no Ray cluster answers at {found} ({why}); {_remedy(address)}")


def _remedy(address: str | None) -> str:
    return f"start one by `ray start --head`, or {'leave --address away' if address else 'unset RAY_ADDRESS'}"


def _why_silent(address: str) -> str | None:
    """Returns why no cluster head answers at the address; None if one does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), JOIN_S).close()
    except OSError as error:
        return error.strerror or str(error)
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_HEALTH)(b"", timeout=JOIN_S)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return "the server there is not the head of a Ray cluster"
    return None
