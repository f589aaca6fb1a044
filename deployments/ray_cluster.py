"""Connects to Ray: joins a running cluster if one answers, else starts a cluster."""

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
"""Maximum seconds to wait until a cluster answers; Ray itself would wait for minutes."""
LOCAL = "local"
"""Value of the address with which Ray starts a new cluster."""
PROXY_ENV = {"no_grpc_proxy": "0.0.0.0/0,::/0,localhost"}
"""Environment that turns off proxies for gRPC only. Serve calls replicas by gRPC at the addresses of their nodes, which
a proxy (http_proxy) may be unable to reach. Downloads from the hub still use the proxy.
"""
NODE_S = 180
"""Maximum seconds to wait until the processes of a Ray cluster started here have registered."""
SOON_S, LOOK_S = 5.0, 0.02
"""SOON_S: seconds within which a new node usually registers. LOOK_S: seconds between two checks during that time. After
that time, Ray's own slower polling is used.
"""
PROCESS_GRACE_S = 5.0
"""Seconds that the processes of a failed start of Ray have to end by themselves."""
ADVICE = (
    "the machine may be too busy or out of memory: end other work, or start Ray separately with `ray start --head`, "
    "and try again"
)
_HEALTH = "/grpc.health.v1.Health/Check"


class ClusterError(RuntimeError):
    """No Ray cluster can be used; the message is one line that names what to change."""


def connect(address: str | None, say: Callable[[str], None]) -> None:
    """Joins the cluster at an address, or starts a cluster; if the start fails, it is tried a second time.

    Args:
        address: as in `address_to_join`.
        say: shows one line.

    Raises:
        ClusterError: no cluster answers, or Ray does not start.
        KeyboardInterrupt: a signal arrived during the call.
    """
    found = address_to_join(address)
    why = _why_down(LOCAL if found == LOCAL else address)
    if why is None:
        return
    if found != LOCAL:
        raise ClusterError(f"the Ray cluster at {found} cannot be joined: {why}")
    # The second attempt exists because Ray's own time limits of a minute are too short on a machine whose CPUs are
    # busy.
    say(f"starting Ray once more: {why}")
    end(descendants(os.getpid()), PROCESS_GRACE_S)
    why = _why_down(LOCAL)
    if why is not None:
        raise ClusterError(f"Ray cannot start, in two attempts: {why}; {ADVICE}")


def _why_down(address: str | None) -> str | None:
    """Starts or joins a Ray cluster; returns one line with the reason if that failed, None if it succeeded."""
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
    except Exception as error:  # if a node does not start, Ray raises no narrower class
        ray.shutdown()
        return root_cause(error)
    return None


class _OwnPaths(JobConfig):
    """Job settings that keep the working directory out of the workers' import paths, because the directory may be
    untrusted.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        """Returns True, although no working directory is packed, because Ray adds the current directory to the import
        paths only if this method returns False.
        """
        return True


@contextlib.contextmanager
def head_for_serving() -> Iterator[None]:
    """Context in which `ray.init` starts a head without dashboard and autoscaler monitor, and waits longer for
    processes.

    Methods of Ray are replaced, because `ray.init` has no arguments for these changes. Even if its pages are turned
    off, Ray starts the dashboard's process to count usage; the process takes seconds to start, and needs 75 MB and a
    port. The autoscaler's monitor needs 50 MB and looks for machines to start. Users who want the dashboard or the
    monitor start a cluster with `ray start` and serve in that cluster.
    """
    spare = [name for name in ("start_api_server", "start_monitor") if hasattr(Node, name)]
    with contextlib.ExitStack() as stack:
        for name in spare:
            stack.enter_context(mock.patch.object(Node, name, _nothing))
        stack.enter_context(mock.patch.object(services, "get_node", _looked_up_soon(services.get_node)))
        # Ray has no setting for this timeout; Ray's value of 60 s is too short for the start of a raylet on a busy
        # machine.
        stack.enter_context(mock.patch.object(services.wait_for_node, "__defaults__", (NODE_S,)))
        yield


def _looked_up_soon(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Wraps Ray's `get_node` with faster polling during the first seconds, because Ray itself polls once a second."""

    def registered(gcs_address: str, node_id: str) -> Any:
        client, until = GcsClient(address=gcs_address), time.monotonic() + SOON_S
        while time.monotonic() < until:
            if node_id in {node.hex() for node in client.get_all_node_info(timeout=JOIN_S)}:
                break
            time.sleep(LOOK_S)
        return get_node(gcs_address, node_id)

    return registered


def _nothing(*arguments: object, **options: object) -> None:
    """Does nothing; replaces methods of Ray's `Node` that start a process."""


def address_to_join(address: str | None) -> str:
    """Returns the address of the running cluster that Ray would join, or `local` if Ray would start its own.

    Args:
        address: HOST:PORT or `auto`. With None, the address is that of RAY_ADDRESS, or if this is not set, of the
            cluster that `ray start` has started on this machine.

    Raises:
        ClusterError: an address was given (by the argument or RAY_ADDRESS), but no cluster answers there.
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
        return LOCAL  # the address comes from a file, which is left behind when a cluster of `ray start` is killed
    raise ClusterError(f"{source}: no Ray cluster answers at {found} ({why}); {_remedy(address)}")


def _remedy(address: str | None) -> str:
    return f"start one by `ray start --head`, or {'leave --address away' if address else 'unset RAY_ADDRESS'}"


def _why_silent(address: str) -> str | None:
    """Returns the reason why no cluster head answers at the address; None if a cluster head answers."""
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
