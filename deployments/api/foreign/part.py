"""Hooks for fields of other servers. Commands import this module too, so that the table is imported only when used."""

unserved_fields = "wingbeat.deployments.api.foreign.fields:unserved_fields"
