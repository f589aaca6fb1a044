"""Hooks for tools and reasoning in chats. Commands import this module too, so that other modules are imported
lazily.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import API
from wingbeat.deployments.parsing.names import BY_TEMPLATE, REASONING_PARSERS, TOOL_CALL_PARSERS, load_parser

if TYPE_CHECKING:
    from wingbeat.deployments.api.parsed.tools import ToolFields
    from wingbeat.deployments.app_config import AppConfig

message_fields = "wingbeat.deployments.api.parsed.tools:CallFields"
chat_reader = "wingbeat.deployments.api.parsed.reading:chat_reader"
_SETTINGS = {
    "tool_call_parser": ("tool calls", TOOL_CALL_PARSERS),
    "reasoning_parser": ("reasoning", REASONING_PARSERS),
}
_SAYS = "Parser that finds {} in answers: {}, your own module:Class, or none; auto follows the chat template."
settings = {
    name: (
        str | None,
        Field(BY_TEMPLATE, description=_SAYS.format(what, ", ".join(known)), json_schema_extra={"panel": API}),
    )
    for name, (what, known) in _SETTINGS.items()
}


def check_settings(config: "AppConfig") -> None:
    """Raises ValueError if a setting is neither a parser's name nor the import path of one."""
    for setting, (_, known) in _SETTINGS.items():
        name = getattr(config, setting)
        if name not in (BY_TEMPLATE, *known):
            load_parser(name, known, setting)


def chat_fields() -> "type[ToolFields]":
    """Returns the class of request fields about tools, calls and reasoning."""
    from wingbeat.deployments.api.parsed.tools import ToolFields

    return ToolFields
