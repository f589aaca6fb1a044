"""Hook of `/load`."""

add_routes = "wingbeat.deployments.api.load_route.load:add_load"
