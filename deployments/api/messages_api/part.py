"""`/v1/messages` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

add_routes = "wingbeat.deployments.api.messages_api.routes:add_messages_routes"
bodies = "wingbeat.deployments.api.messages_api.routes:BODIES"
error_body = "wingbeat.deployments.api.messages_api.error_form:error_body"
