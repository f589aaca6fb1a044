"""Methods of a router that a handle calls."""

router_base = "wingbeat.deployments.api.handles.calls:HandleCalls"
