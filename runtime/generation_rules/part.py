"""Hook of the rules that apply to every request of a model."""

request_rules = "wingbeat.runtime.generation_rules.generation_config:request_rules"
