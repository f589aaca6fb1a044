"""Hooks of `/v1/responses`. Commands import this module too, so that the route is imported only when used."""

add_routes = "wingbeat.deployments.api.responses_api.routes:add_responses_route"
bodies = "wingbeat.deployments.api.responses_api.routes:BODIES"
