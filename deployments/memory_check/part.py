"""Hook of the memory check before a start."""

check_memory = "wingbeat.deployments.memory_check.check:check_memory"
