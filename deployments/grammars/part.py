"""Hooks of structured output. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.grammars.fields import GrammarFields

serve_grammars = "wingbeat.runtime.grammar.trial:GrammarTrial"


def sampling_fields() -> "type[GrammarFields]":
    """Return the class with the fields `structured_outputs` and `response_format`."""
    from wingbeat.deployments.grammars.fields import GrammarFields

    return GrammarFields
