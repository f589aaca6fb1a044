"""Hooks for fields of other servers.

The table of fields is imported only when a server uses it, because commands import this module too.
"""

unserved_fields = "wingbeat.deployments.api.foreign.fields:unserved_fields"
