"""Hook of `GET /`. The implementation is named but not imported here, because commands import this file."""

add_routes = "wingbeat.deployments.page.playground:add_page"
