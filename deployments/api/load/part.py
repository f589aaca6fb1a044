"""Hook of `/load`."""

add_routes = "wingbeat.deployments.api.load.load:add_load"
