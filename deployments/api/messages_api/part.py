"""Hooks of `/v1/messages`. Commands import this module too, so that the routes are imported only when used."""

add_routes = "wingbeat.deployments.api.messages_api.routes:add_messages_routes"
bodies = "wingbeat.deployments.api.messages_api.routes:BODIES"
error_body = "wingbeat.deployments.api.messages_api.error_form:error_body"
