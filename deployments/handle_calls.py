"""Calls of Serve handles, each under a request id of its own.

Serve gives a handle call the id of the HTTP request in whose context the call is made. If two calls with one id wait
for a replica at the same time, Serve's request router fulfils the first and searches for the second forever, in a busy
loop. A call is also cancelled together with the HTTP request of its id, even if others wait for the call.
"""

from contextvars import Context
from typing import Any

from ray.serve.handle import DeploymentHandle


def call_apart(method: DeploymentHandle, *args: Any, **kwargs: Any) -> Any:
    """Calls `method.remote(...)` outside the current request's context, so that Serve draws a new request id.

    Returns Serve's response, or its generator for a streaming handle.
    """
    return Context().run(method.remote, *args, **kwargs)
