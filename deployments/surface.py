"""Builds objects of the HTTP API from settings; separate because settings must not import the API."""

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.app_config import AppConfig


def access_of(config: AppConfig, bound_host: str | None) -> Access:
    """Returns the access rules of the HTTP API for a server bound to `bound_host`."""
    return Access.of_server(
        bound_host,
        api_keys=config.api_key,
        operator_keys=config.operator_key,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )
