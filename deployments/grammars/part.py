"""Structured output among the fields of requests; imported by commands too, so that it imports what it adds later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.grammars.fields import GrammarFields

serve_grammars = "wingbeat.runtime.grammar.trial:GrammarTrial"


def sampling_fields() -> "type[GrammarFields]":
    """`structured_outputs` and `response_format`."""
    from wingbeat.deployments.grammars.fields import GrammarFields

    return GrammarFields
