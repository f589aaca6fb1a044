"""A chat's only choice, taken apart as it comes: what endpoints in other forms than chat's are written from."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from wingbeat.deployments.api.answers.generation import ChoiceDelta, Generation
from wingbeat.deployments.api.answers.responses import Totals
from wingbeat.deployments.api.parsed.chat_shape import read_piece
from wingbeat.deployments.parsing.message import MessageDelta, PlainText
from wingbeat.runtime.scheduling.request import FinishReason


class Piece(NamedTuple):
    """What some tokens brought."""

    found: MessageDelta
    finish_reason: FinishReason | None
    totals: Totals
    """So far."""
    stop: str | int | None
    """The stop string or token that ended it."""
    reasoning_tokens: int
    """So far; tokens that came together with the first of the answer count to the answer."""


ParsedAnswer = AsyncGenerator[Piece, None]


async def parsed(generation: Generation, deltas: AsyncGenerator[ChoiceDelta, None]) -> ParsedAnswer:
    """The pieces of an answer with one choice; raises what `deltas` raises."""
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
