"""Hooks of a router that listens itself. Implementations are imported on use, because commands import this file."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

DIRECT, HAPROXY = "RAY_SERVE_ENABLE_DIRECT_INGRESS", "RAY_SERVE_ENABLE_HA_PROXY"
"""Serve's environment variables that select direct ingress and HAProxy instead of Serve's own proxy. If the first
variable is "0", requests go through Serve's proxy, and the router does not listen on a socket of its own.
"""

open_door = "wingbeat.deployments.front_door.door:opened_door"


def wants_door(config: "AppConfig") -> bool:
    """Return whether there is a single router, which is to listen on a socket itself; Serve then gets no ingress."""
    several = config.num_router_replicas > 1 or config.router_autoscaling_config is not None
    wanted = not several and os.environ.get(DIRECT) != "0" and os.environ.get(HAPROXY) != "1"
    if wanted:
        os.environ[DIRECT] = "0"
    return wanted
