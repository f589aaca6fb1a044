"""The description among the endpoints; imported by commands too, so that it imports what it adds later."""

add_last = "wingbeat.deployments.api.description.routes:add_description"
