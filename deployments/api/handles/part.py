"""Hook for the methods of a router that handles call."""

router_base = "wingbeat.deployments.api.handles.calls:HandleCalls"
