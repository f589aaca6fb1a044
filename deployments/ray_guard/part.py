"""Hook of the guard of a Ray cluster that the launcher has started."""

guard_ray = "wingbeat.deployments.ray_guard.guard:RayGuard"
