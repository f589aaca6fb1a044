"""Hook of `GET /`. Commands import this file, so it names its implementation without importing it."""

add_routes = "wingbeat.deployments.page.playground:add_page"
