"""The request field that names a saved prefix."""

from wingbeat.deployments.api.bodies.unserved_fields import Part


class PrefixFields(Part):
    """Fields that are added to all requests that generate text."""

    prefix: str | None = None
    """Extension: the name of a saved prefix, which is put before the request's own prompt."""
