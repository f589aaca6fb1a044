"""Which parser reads the answer to a chat request."""

from collections.abc import Callable
from functools import partial

from wingbeat.deployments.api.chat_requests import ChatBody
from wingbeat.deployments.api.errors import unsupported
from wingbeat.deployments.api.tool_requests import NamedTool, needs_parser
from wingbeat.deployments.parsing.call_list import CallListParser, OneCallParser
from wingbeat.deployments.parsing.message import Filtered, Parser
from wingbeat.deployments.parsing.registry import Parsers


def parser_of_answer(parsers: Parsers, body: ChatBody, prompt: str) -> Callable[[], Parser]:
    """Makes a parser for each choice.

    Args:
        parsers: the server's.
        body: the request.
        prompt: the end of the prompt's text.

    Raises:
        ApiError: the request has tools, and nothing here would find the calls.
    """
    calls, answer = body.calls, None
    if calls == "auto" and not parsers.read_calls:
        raise needs_parser()
    if calls == "required":
        answer = CallListParser
    elif isinstance(calls, NamedTool):
        answer = partial(OneCallParser, calls.function.name)
    if answer is not None:
        raise unsupported("tool_choice")

    def new() -> Parser:
        parser = parsers.new(prompt, calls=calls == "auto", answer=answer)
        keeps_reasoning, keeps_calls = body.include_reasoning is not False, body.parallel_tool_calls is not False
        if keeps_reasoning and keeps_calls:
            return parser
        return Filtered(parser, reasoning=keeps_reasoning, parallel_calls=keeps_calls)

    return new
