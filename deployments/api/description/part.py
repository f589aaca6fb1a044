"""Hooks of the API description. Commands import this module too, so that the routes are imported only when used."""

add_last = "wingbeat.deployments.api.description.routes:add_description"
