"""Parses the single choice of a chat incrementally, for the Messages API and the Responses API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from wingbeat.deployments.api.answers.generation import ChoiceDelta, Generation
from wingbeat.deployments.api.answers.responses import Totals
from wingbeat.deployments.api.parsed.chat_shape import read_piece
from wingbeat.deployments.parsing.message import MessageDelta, PlainText
from wingbeat.runtime.scheduling.request import FinishReason


class Piece(NamedTuple):
    """New text, reasoning and calls from one delta."""

    found: MessageDelta
    finish_reason: FinishReason | None
    totals: Totals
    """Totals of the answer so far; one object for all pieces."""
    stop: str | int | None
    """Stop string or token id that ended the answer; None in all pieces but the last."""
    reasoning_tokens: int
    """Number of reasoning tokens so far. If the reasoning ends and the answer begins within one delta, all tokens of
    the delta count as answer tokens.
    """


ParsedAnswer = AsyncGenerator[Piece, None]


async def parsed(generation: Generation, deltas: AsyncGenerator[ChoiceDelta, None]) -> ParsedAnswer:
    """Yields the pieces of an answer with one choice; raises the errors of `deltas`."""
    parser, totals = (generation.new_parser or PlainText)(), Totals(generation)
    reasoning_tokens, is_answering = 0, False
    async with aclosing(deltas):
        async for delta in deltas:
            totals.add(delta)
            found = read_piece(parser, delta)
            is_answering |= bool(found.content or found.tool_calls)
            if found.reasoning and not is_answering:
                reasoning_tokens += delta.num_tokens
            yield Piece(found, delta.finish_reason, totals, delta.stop_reason, reasoning_tokens)
