"""`GET /` among the routes; imported by commands too, so that it imports what it adds where it adds it."""

add_routes = "wingbeat.deployments.page.playground:add_page"
