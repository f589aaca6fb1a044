"""What a chat request's answer must look like, and which parser reads it."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from wingbeat.deployments.api.answers.generation import Choice, Generation, Prompt
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.unserved_fields import ignored_fields
from wingbeat.deployments.api.errors import invalid, shown
from wingbeat.deployments.api.parsed.chat_shape import ParsedChatShape
from wingbeat.deployments.api.parsed.tools import NamedTool, Tool, shows_no_tools
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parsing.call_format import (
    Format,
    Function,
    PlacedSchema,
    json_of,
    list_of_calls,
    one_of,
    text,
)
from wingbeat.deployments.parsing.call_list import CallListParser, OneCallParser
from wingbeat.deployments.parsing.message import Filtered, Parser
from wingbeat.deployments.parsing.registry import Parsers
from wingbeat.runtime.scheduling.request import GrammarSpec

ANY_OBJECT = {"type": "object"}


class Reading(NamedTuple):
    """How an answer is constrained and read."""

    new_parser: Callable[[], Parser]
    """Makes a parser for each choice."""
    grammar: GrammarSpec | None


class ChatParsers(Parsers):
    """The parsers of one server, as chats are read by them."""

    def read(self, body: ChatBody, prompt: Prompt, generation: Generation) -> Generation:
        """See `ChatReader`; raises as `reading_of`."""
        reading = reading_of(self, body, prompt.end, generation.choices[0].request.params.grammar)
        shows_marks = reading.new_parser().keeps_special_tokens
        choices = tuple(_read_so(choice, reading, shows_marks) for choice in generation.choices)
        return replace(generation, choices=choices, new_parser=reading.new_parser, new_shape=ParsedChatShape)


def chat_reader(config: AppConfig, template: str | None) -> ChatParsers:
    """Reader of the answers of a model with this chat template."""
    return ChatParsers.of_template(config.tool_call_parser, config.reasoning_parser, template)


def _read_so(choice: Choice, reading: Reading, shows_marks: bool) -> Choice:
    """The choice under the grammar that the answer is read by, and with the marks that its parser looks for."""
    params = replace(choice.request.params, grammar=reading.grammar)
    skips = choice.skip_special_tokens and not shows_marks
    return replace(choice, request=replace(choice.request, params=params), skip_special_tokens=skips)


def reading_of(parsers: Parsers, body: ChatBody, prompt: str, grammar: GrammarSpec | None) -> Reading:
    """How the answer to a chat request is constrained and read.

    Args:
        parsers: the server's.
        body: the request.
        prompt: the end of the prompt's text.
        grammar: what the request itself says the answer must match; thoughts come before it.

    Raises:
        ApiError: the request has tools that the model would never see; or two fields ask for two forms.
    """
    calls, functions = body.calls, _functions(body)
    form, answer = _form_of_calls(parsers, body, prompt)
    if form is not None and grammar is not None:
        form, grammar = _form_beside_calls(parsers, body, prompt, form, grammar), None
    if grammar is not None and parsers.thoughts_format(prompt) is not None:
        form = parsers.behind_thoughts(prompt, _form_of_grammar(grammar))
    if form is not None:
        field = "tools" if grammar is None else grammar.field
        grammar = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}), field)

    def new() -> Parser:
        parser = parsers.new(prompt, calls=calls != "none", answer=answer, functions=functions)
        keeps_reasoning, keeps_calls = body.include_reasoning is not False, body.parallel_tool_calls is not False
        if keeps_reasoning and keeps_calls:
            return parser
        return Filtered(parser, reasoning=keeps_reasoning, parallel_calls=keeps_calls)

    return Reading(new, grammar)


def _form_beside_calls(parsers: Parsers, body: ChatBody, prompt: str, calls: Format, grammar: GrammarSpec) -> Format:
    """The form of an answer whose calls have one, and whose text has a response format.

    Calls that are forced are the whole answer, so that there is no text to have a format.

    Raises:
        ApiError: 'structured_outputs' shapes the whole answer, and so do the calls.
    """
    if body.structured_outputs is not None:
        raise invalid("tool_choice", "contradicts 'structured_outputs': both shape the answer")
    if body.calls != "auto":
        return calls
    several = body.parallel_tool_calls is not False
    alone = parsers.calls_format(_strict_functions(body), several, required=True, prompt=prompt)
    return one_of(alone, parsers.behind_thoughts(prompt, _form_of_grammar(grammar)))


def _form_of_calls(parsers: Parsers, body: ChatBody, prompt: str) -> tuple[Format | None, Callable[[], Parser] | None]:
    """The form that the request's tools give the answer, and what reads it in place of the server's parser."""
    calls, functions, several = body.calls, _functions(body), body.parallel_tool_calls is not False
    if calls == "none":
        return None, None
    if calls == "auto":
        if not parsers.read_calls and not parsers.shows_tools:
            raise shows_no_tools()
        return _form_of_strict(parsers, body, prompt), None
    if isinstance(calls, NamedTool):
        functions = [function for function in functions if function.name == calls.function.name][:1]
        several = False
    form = parsers.calls_format(functions, several, required=True, prompt=prompt)
    if form is not None:
        return form, None
    if isinstance(calls, NamedTool):
        form, answer = json_of(functions[0].schema), partial(OneCallParser, calls.function.name)
    else:
        form, answer = list_of_calls(functions, several), CallListParser
    return parsers.behind_thoughts(prompt, form), answer


def _functions(body: ChatBody) -> list[Function]:
    return [_function(index, tool) for index, tool in enumerate(body.tools or ())]


def _function(index: int, tool: Tool) -> Function:
    """A tool, whose schema is named in errors by its place in the request."""
    name = tool.function.name
    place = f"tools[{index}].function.parameters of {name!r}"
    return Function(name, PlacedSchema(tool.function.schema_of_arguments(), place))


def _form_of_strict(parsers: Parsers, body: ChatBody, prompt: str) -> Format | None:
    """The form of text that may have calls, where the arguments of some function must follow its schema."""
    tools = body.tools or []
    if not any(tool.function.strict for tool in tools):
        return None
    several = body.parallel_tool_calls is not False
    form = parsers.calls_format(_strict_functions(body), several, required=False, prompt=prompt)
    if form is None:
        _pass_over_strict(body)
    return form


def _strict_functions(body: ChatBody) -> list[Function]:
    """The functions, of which those that are not strict take any object."""
    return [
        _function(index, tool) if tool.function.strict else Function(tool.function.name, ANY_OBJECT)
        for index, tool in enumerate(body.tools or ())
    ]


def _pass_over_strict(body: ChatBody) -> None:
    """Agents make all their functions strict: calls in a format without a form are the model's own.

    Raises:
        ApiError: 400, where what is passed over is refused by setting.
    """
    if ignored_fields().refuses:
        raise invalid("tools", "has a strict function, which the server's tool-call parser cannot make sure of")
    for index, tool in enumerate(body.tools or ()):
        if tool.function.strict:
            ignored_fields().name(f"tools[{index}]", "strict")


def _form_of_grammar(grammar: GrammarSpec) -> Format:
    """The same in the words of structural tags, so that thoughts can come before it.

    Raises:
        ApiError: it is no JSON, or an older kind of structural tag.
    """
    try:
        return _in_words_of_tags(grammar)
    except (ValueError, TypeError, KeyError) as error:
        raise invalid("structured_outputs", f"cannot be read as {grammar.kind}: {shown(str(error))}") from error


def _in_words_of_tags(grammar: GrammarSpec) -> Format:
    match grammar.kind:
        case "json":
            return json_of(json.loads(grammar.text))
        case "json_object":
            return json_of(ANY_OBJECT)
        case "choice":
            return one_of(*map(text, json.loads(grammar.text)))
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "grammar":
            return {"type": "grammar", "grammar": grammar.text}
        case _:
            return json.loads(grammar.text)["format"]
