"""The Ray that an application runs on: a running cluster that answers, or one that this process starts."""

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
"""For a cluster to answer, before Ray itself would wait for minutes."""
LOCAL = "local"
"""Ray's name for a cluster of this process's own."""
PROXY_ENV = {"no_grpc_proxy": "0.0.0.0/0,::/0,localhost"}
"""Serve calls replicas by gRPC at their nodes' addresses, which no proxy of the environment (http_proxy) can reach;
downloads from the hub keep the proxy."""
NODE_S = 180
"""For the processes of a Ray started here to register."""
SOON_S, LOOK_S = 5.0, 0.02
"""For a node to register, beyond which Ray's own looks and limits are enough, and between two looks until then."""
PROCESS_GRACE_S = 5.0
"""For the processes of a Ray that has not come up to end by themselves."""
ADVICE = (
    "the machine may be too busy, or its memory used up: end other work, or start Ray apart by `ray start --head`, and "
    "try again"
)
_HEALTH = "/grpc.health.v1.Health/Check"


class ClusterError(RuntimeError):
    """There is no Ray to run on; one line that says what to change."""


def connect(address: str | None, say: Callable[[str], None]) -> None:
    """Join the cluster at an address, or start one; a start that fails is tried a second time.

    Args:
        address: as of `address_to_join`.
        say: shows one line.

    Raises:
        ClusterError: no cluster answers, or Ray does not come up.
        KeyboardInterrupt: a signal came meanwhile.
    """
    found = address_to_join(address)
    why = _why_down(LOCAL if found == LOCAL else address)
    if why is None:
        return
    if found != LOCAL:
        raise ClusterError(f"the Ray cluster at {found} cannot be joined: {why}")
    # Other limits of Ray's are a minute, which is short where others have the processors.
    say(f"starting Ray once more: {why}")
    end(descendants(os.getpid()), PROCESS_GRACE_S)
    why = _why_down(LOCAL)
    if why is not None:
        raise ClusterError(f"Ray cannot start, in two attempts: {why}; {ADVICE}")


def _why_down(address: str | None) -> str | None:
    """Why Ray does not come up, in one line; None where it does."""
    try:
        with head_for_serving():
            ray.init(
                address=address,
                namespace="serve",
                logging_level=logging.ERROR,
                include_dashboard=False,
                job_config=_OwnPaths(),
            )
    except SystemExit:  # by the handler that it installs for as long as it runs
        raise KeyboardInterrupt from None
    except Exception as error:  # Ray raises nothing narrower where a node does not come up
        ray.shutdown()
        return root_cause(error)
    return None


class _OwnPaths(JobConfig):
    """Job whose workers import nothing from the command's working directory, which may be an untrusted checkpoint."""

    def _runtime_env_has_working_dir(self) -> bool:
        """Ray adds the working directory to its workers' import paths only where no other one was packed for them."""
        return True


@contextlib.contextmanager
def head_for_serving() -> Iterator[None]:
    """Start a head without the processes that serving does not need, and patiently; `ray.init` has no such arguments.

    Even without its pages Ray's dashboard takes seconds, 75 MB and a port, to count usage; the autoscaler's monitor,
    50 MB, looks for machines to start. Whoever wants them starts a cluster by `ray start`, and serves there.
    """
    spare = [name for name in ("start_api_server", "start_monitor") if hasattr(Node, name)]
    with contextlib.ExitStack() as stack:
        for name in spare:
            stack.enter_context(mock.patch.object(Node, name, _nothing))
        stack.enter_context(mock.patch.object(services, "get_node", _looked_up_soon(services.get_node)))
        # Ray has no setting for this limit of its own; a raylet on a busy machine takes more than its 60 s.
        stack.enter_context(mock.patch.object(services.wait_for_node, "__defaults__", (NODE_S,)))
        yield


def _looked_up_soon(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Ray's own, but that a node which registers soon is seen at once: Ray looks once a second."""

    def registered(gcs_address: str, node_id: str) -> Any:
        client, until = GcsClient(address=gcs_address), time.monotonic() + SOON_S
        while time.monotonic() < until:
            if node_id in {node.hex() for node in client.get_all_node_info(timeout=JOIN_S)}:
                break
            time.sleep(LOOK_S)
        return get_node(gcs_address, node_id)

    return registered


def _nothing(*arguments: object, **options: object) -> None:
    """In the place of what starts a process."""


def address_to_join(address: str | None) -> str:
    """Address of the running cluster that Ray would join, or `local` where it would start its own.

    Args:
        address: HOST:PORT, `auto`, or None for what RAY_ADDRESS says, and else whatever `ray start` has started here.

    Raises:
        ClusterError: none answers at the address.
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
        return LOCAL  # the file that `ray start` leaves behind a cluster that was killed
    raise ClusterError(f"{source}: no Ray cluster answers at {found} ({why}); {_remedy(address)}")


def _remedy(address: str | None) -> str:
    return f"start one by `ray start --head`, or {'leave --address away' if address else 'unset RAY_ADDRESS'}"


def _why_silent(address: str) -> str | None:
    """Why no cluster's head answers; None where one does."""
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
                return "what listens there is no head of a Ray cluster"
    return None
