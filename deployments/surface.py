"""What the HTTP surface is built from, made of settings, which lie below it and know none of it."""

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.app_config import AppConfig


def access_of(config: AppConfig, bound_host: str | None) -> Access:
    """Who may use the HTTP surface of a server bound to `bound_host`."""
    return Access.of_server(
        bound_host,
        api_keys=config.api_key,
        operator_keys=config.operator_key,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )
