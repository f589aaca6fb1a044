"""Hook that adds the methods for handles to a router."""

router_base = "wingbeat.deployments.api.handles.calls:HandleCalls"
