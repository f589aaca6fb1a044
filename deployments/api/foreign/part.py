"""Fields of other servers; imported by commands too, so that it imports what it adds later."""

unserved_fields = "wingbeat.deployments.api.foreign.fields:unserved_fields"
