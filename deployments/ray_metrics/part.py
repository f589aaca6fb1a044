"""Hook of Ray's metrics. The implementation is given by its import path and not imported here, because commands import
this file.
"""

publish = "wingbeat.deployments.ray_metrics.ray_export:publish"
