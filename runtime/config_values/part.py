"""Registers the conversion and the check of values in the config files of checkpoints."""

meant_fields = "wingbeat.runtime.config_values.field_values:meant"
config_problem = "wingbeat.runtime.config_values.config_numbers:problem"
