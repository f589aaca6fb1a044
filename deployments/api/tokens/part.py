"""`/tokenize` and its like among the endpoints; imported by commands too, so that it imports what it adds later."""

add_routes = "wingbeat.deployments.api.tokens.routes:add_token_routes"
bodies = "wingbeat.deployments.api.tokens.routes:BODIES"
