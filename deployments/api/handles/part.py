"""Methods of a router that a handle calls."""


def router_base() -> type:
    """A class that routers inherit."""
    from wingbeat.deployments.api.handles.calls import HandleCalls

    return HandleCalls
