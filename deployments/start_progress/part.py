"""Hook of the progress of a start."""

start_up = "wingbeat.deployments.start_progress.progress:Progress"
