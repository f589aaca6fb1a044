"""Hooks of the checks before a start."""

check_arguments = "wingbeat.deployments.start_checks.named_folders:check_named_folders"
check_start = "wingbeat.deployments.start_checks.preflight:check"
check_in_cluster = "wingbeat.deployments.start_checks.room:check_in_cluster"
