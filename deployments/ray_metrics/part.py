"""Ray's metrics beside those of `/metrics`; imported by commands too, so that it loads nothing."""

publish = "wingbeat.deployments.ray_metrics.ray_export:publish"
