"""`/v1/responses` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

add_routes = "wingbeat.deployments.api.responses_api.routes:add_responses_route"
bodies = "wingbeat.deployments.api.responses_api.routes:BODIES"
