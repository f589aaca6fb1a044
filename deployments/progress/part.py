"""Hook of the progress of a start."""

start_up = "wingbeat.deployments.progress.progress:Progress"
