"""What the HTTP surface is built from, made of settings, which lie below it and know none of it."""

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parsing.registry import Parsers


def access_of(config: AppConfig, bound_host: str | None) -> Access:
    """Who may use the HTTP surface of a server bound to `bound_host`."""
    return Access.of_server(
        bound_host,
        api_keys=config.api_key,
        operator_keys=config.operator_key,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )


def parsers_of(config: AppConfig, chat_template: str | None) -> Parsers:
    """What reads the answers of a model with this chat template.

    Raises:
        ValueError: there is no parser of a name, or a class is none; says which there are.
    """
    return Parsers.of_template(config.tool_call_parser, config.reasoning_parser, chat_template)
