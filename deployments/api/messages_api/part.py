"""Hooks of `/v1/messages`.

The routes are imported only when a server adds them, because commands import this module too.
"""

add_routes = "wingbeat.deployments.api.messages_api.routes:add_messages_routes"
bodies = "wingbeat.deployments.api.messages_api.routes:BODIES"
error_body = "wingbeat.deployments.api.messages_api.error_form:error_body"
