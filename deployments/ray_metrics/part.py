"""Hook of Ray's metrics. The implementation is named but not imported here, because commands import this file."""

publish = "wingbeat.deployments.ray_metrics.ray_export:publish"
