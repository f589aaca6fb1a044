"""Chooses the grammar that constrains a chat's answer, and the parser that reads the answer."""

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
from wingbeat.deployments.parsing.formats.call_list import CallListParser, OneCallParser
from wingbeat.deployments.parsing.message import Filtered, Parser
from wingbeat.deployments.parsing.registry import Parsers
from wingbeat.runtime.scheduling.request import GrammarSpec

ANY_OBJECT = {"type": "object"}


class Reading(NamedTuple):
    """Grammar and parser chosen for an answer."""

    new_parser: Callable[[], Parser]
    """Makes the parser of each choice."""
    grammar: GrammarSpec | None


class ChatParsers(Parsers):
    """The parsers of one model, applied to chat requests."""

    def read(self, body: ChatBody, prompt: Prompt, generation: Generation) -> Generation:
        """Adds grammar and parser to a generation, see `ChatReader.read`; raises the errors of `reading_of`."""
        reading = reading_of(self, body, prompt.end, generation.choices[0].request.params.grammar)
        shows_marks = reading.new_parser().keeps_special_tokens
        choices = tuple(_read_so(choice, reading, shows_marks) for choice in generation.choices)
        return replace(generation, choices=choices, new_parser=reading.new_parser, new_shape=ParsedChatShape)


def chat_reader(config: AppConfig, template: str | None) -> ChatParsers:
    """Makes the reader for a model. If a parser setting is `auto`, the parser is chosen by the model's chat
    template.
    """
    return ChatParsers.of_template(config.tool_call_parser, config.reasoning_parser, template)


def _read_so(choice: Choice, reading: Reading, shows_marks: bool) -> Choice:
    """Returns the choice with the reading's grammar. If the parser needs special tokens, the choice's text keeps
    them.
    """
    params = replace(choice.request.params, grammar=reading.grammar)
    skips = choice.skip_special_tokens and not shows_marks
    return replace(choice, request=replace(choice.request, params=params), skip_special_tokens=skips)


def reading_of(parsers: Parsers, body: ChatBody, prompt: str, grammar: GrammarSpec | None) -> Reading:
    """Returns grammar and parser for the answer to a chat request.

    Args:
        parsers: parsers of the server.
        body: the request.
        prompt: end of the prompt's text.
        grammar: grammar that the request contains. The grammar constrains the answer's text, but not the reasoning
            before the text.

    Raises:
        ApiError: the request has tools that the model would not see, or two fields ask for different formats.
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
    """Returns the format of an answer that consists either of calls or of text in the response format `grammar`.

    If `tool_choice` forces calls, the result is `calls`, and the response format is ignored.

    Raises:
        ApiError: `structured_outputs` is given, which would constrain the whole answer and so contradicts the calls.
    """
    if body.structured_outputs is not None:
        raise invalid("tool_choice", "contradicts 'structured_outputs': both constrain the whole answer")
    if body.calls != "auto":
        return calls
    several = body.parallel_tool_calls is not False
    alone = parsers.calls_format(_strict_functions(body), several, required=True, prompt=prompt)
    return one_of(alone, parsers.behind_thoughts(prompt, _form_of_grammar(grammar)))


def _form_of_calls(parsers: Parsers, body: ChatBody, prompt: str) -> tuple[Format | None, Callable[[], Parser] | None]:
    """Returns two values: the format that the tools require (None if they require none), and the parser to use instead
    of the server's parser (None if the server's parser is used).
    """
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
    """Returns a tool's function with its schema; errors about the schema name its path in the request."""
    name = tool.function.name
    place = f"tools[{index}].function.parameters of {name!r}"
    return Function(name, PlacedSchema(tool.function.schema_of_arguments(), place))


def _form_of_strict(parsers: Parsers, body: ChatBody, prompt: str) -> Format | None:
    """Returns the format of text with optional calls. Returns None if no function is strict, or if the parser defines
    no format of calls.
    """
    tools = body.tools or []
    if not any(tool.function.strict for tool in tools):
        return None
    several = body.parallel_tool_calls is not False
    form = parsers.calls_format(_strict_functions(body), several, required=False, prompt=prompt)
    if form is None:
        _pass_over_strict(body)
    return form


def _strict_functions(body: ChatBody) -> list[Function]:
    """Returns the functions of the request. For a function that is not strict, the schema is replaced by a schema that
    accepts any object as arguments.
    """
    return [
        _function(index, tool) if tool.function.strict else Function(tool.function.name, ANY_OBJECT)
        for index, tool in enumerate(body.tools or ())
    ]


def _pass_over_strict(body: ChatBody) -> None:
    """Records the field `strict` of each strict function as ignored.

    Called if the parser's call format cannot be constrained. Requests are not refused, because agents set `strict` on
    all their functions.

    Raises:
        ApiError: 400, if the setting `unknown_fields` refuses ignored fields.
    """
    if ignored_fields().refuses:
        raise invalid("tools", "has a strict function, which the server's tool-call parser cannot enforce")
    for index, tool in enumerate(body.tools or ()):
        if tool.function.strict:
            ignored_fields().name(f"tools[{index}]", "strict")


def _form_of_grammar(grammar: GrammarSpec) -> Format:
    """Converts a grammar to a format of structural tags, so that reasoning can come before the constrained text.

    Raises:
        ApiError: the grammar is not valid JSON, or is a structural tag in the older form.
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
