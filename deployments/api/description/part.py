"""Hooks of the API description.

The routes are imported only when a server adds them, because commands import this module too.
"""

add_last = "wingbeat.deployments.api.description.routes:add_description"
