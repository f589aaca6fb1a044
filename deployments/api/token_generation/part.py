"""Hooks of `/inference/v1/generate`. Commands import this module too, so the routes are imported only when a server
adds them.
"""

add_routes = "wingbeat.deployments.api.token_generation.routes:add_token_generation"
bodies = "wingbeat.deployments.api.token_generation.body:BODIES"
