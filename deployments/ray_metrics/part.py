"""Hook of Ray's metrics. Commands import this file, so it names its implementation without importing it."""

publish = "wingbeat.deployments.ray_metrics.ray_export:publish"
