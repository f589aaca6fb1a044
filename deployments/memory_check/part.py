"""The check among what is held against this machine before a start."""

check_memory = "wingbeat.deployments.memory_check.check:check_memory"
