"""What a router answers to a handle, among its methods."""


def router_base() -> type:
    """A class that routers inherit."""
    from wingbeat.deployments.api.handles.calls import HandleCalls

    return HandleCalls
