"""Hooks of `/inference/v1/generate`. Commands import this module too, so that routes are imported only when used."""

add_routes = "wingbeat.deployments.api.token_generation.routes:add_token_generation"
bodies = "wingbeat.deployments.api.token_generation.body:BODIES"
