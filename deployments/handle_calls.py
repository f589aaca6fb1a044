"""Calls Serve handles, each call under a separate request id.

By default Serve gives a handle call the id of the HTTP request in whose context the call is made. This causes two
errors. If two calls with the same id wait for a replica at the same time, Serve's request router finds a replica for
the first call and searches for the second call's replica forever, in a busy loop. And if the HTTP request is cancelled,
the call is cancelled too, even if other requests wait for its result.
"""

from contextvars import Context
from typing import Any

from ray.serve.handle import DeploymentHandle


def call_apart(method: DeploymentHandle, *args: Any, **kwargs: Any) -> Any:
    """Calls `method.remote(...)` outside the current request's context, so that Serve generates a new request id.

    Returns Serve's response, or its generator for a streaming handle.
    """
    return Context().run(method.remote, *args, **kwargs)
