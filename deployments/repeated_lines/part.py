"""Hook of repeated log lines."""

log_filter = "wingbeat.deployments.repeated_lines.repeat_filter:RepeatFilter"
