"""Hooks of `/v1/responses`.

The route is imported only when a server adds it, because commands import this module too.
"""

add_routes = "wingbeat.deployments.api.responses_api.routes:add_responses_route"
bodies = "wingbeat.deployments.api.responses_api.routes:BODIES"
