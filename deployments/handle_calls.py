"""Calls of Serve handles, each as a request of its own.

Serve gives a handle's call the id of the HTTP request in whose context it is made. Two calls of one request that wait
for a replica at the same time are then one to Serve's request router: it fulfils the first, and looks for the second
for ever, without a pause between two looks. A call that shares an id is also given up when the HTTP request of that id
is, whoever else waits for it.
"""

from contextvars import Context
from typing import Any

from ray.serve.handle import DeploymentHandle


def call_apart(method: DeploymentHandle, *args: Any, **kwargs: Any) -> Any:
    """`method.remote(...)` outside the context of the request that is being answered, so that Serve draws a new id.

    Returns Serve's response, or its generator of a streaming handle.
    """
    return Context().run(method.remote, *args, **kwargs)
