"""Structured output among the fields of requests; imported by commands too, so that it imports what it adds later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.grammars.fields import GrammarFields
    from wingbeat.runtime.grammar.compiler import Grammars
    from wingbeat.runtime.grammar.trial import GrammarTrial


def sampling_fields() -> "type[GrammarFields]":
    """`structured_outputs` and `response_format`."""
    from wingbeat.deployments.grammars.fields import GrammarFields

    return GrammarFields


def serve_grammars(grammars: "Grammars") -> "GrammarTrial":
    """Have grammars of callers tried out in a process of their own before they are compiled."""
    from wingbeat.runtime.grammar.trial import GrammarTrial

    return GrammarTrial(grammars)
