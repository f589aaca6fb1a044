"""Hook of alternative forms of conversations."""

other_forms = "wingbeat.deployments.api.template_forms.forms:other_forms"
