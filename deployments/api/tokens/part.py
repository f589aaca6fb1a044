"""Hooks of `/tokenize` and related endpoints. Commands import this module too, so routes are imported lazily."""

add_routes = "wingbeat.deployments.api.tokens.routes:add_token_routes"
bodies = "wingbeat.deployments.api.tokens.routes:BODIES"
