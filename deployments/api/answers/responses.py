"""Response bodies of OpenAI's API, whole and as server-sent events, with the extensions `seed` and `metrics`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from wingbeat.deployments.api.answers.generation import ChoiceDelta, Generation, HeldRounds
from wingbeat.deployments.api.answers.json_pieces import fragments, json_pieces, paced
from wingbeat.deployments.api.answers.token_details import HeldDetails, LogprobsBody, chat_logprobs, completion_logprobs
from wingbeat.deployments.api.errors import as_api_error, log_failure
from wingbeat.deployments.metrics.timings import Timings
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import FinishReason

DONE = b"data: [DONE]\n\n"
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""Fields about a prompt that vLLM's clients expect in each answer; null if not requested."""
OF_CHOICE = ("token_ids",)
"""Fields of a choice that vLLM's clients expect in each answer; null if not requested."""


class ResponseShape(Protocol):
    """Form of an endpoint's responses."""

    object_name: str
    chunk_object_name: str
    id_name: str
    """Name of the field with the response's id."""
    logprobs_body: LogprobsBody
    prompt_at_top: bool
    """Whether fields about the prompt are at the top level of the body (for endpoints with one prompt) and not in each
    choice.
    """

    def choice(self, last: ChoiceDelta, text: str) -> dict[str, Any]:
        """Returns a complete choice from its last delta and its whole text."""
        ...

    def chunk_choices(self, delta: ChoiceDelta, is_first: bool) -> list[dict[str, Any]]:
        """Returns the items of `choices` that carry a delta; each item is sent in a separate chunk.

        `is_first` is whether the delta is the first of its choice.
        """
        ...


class CompletionShape:
    """Form of `/v1/completions`."""

    object_name = chunk_object_name = "text_completion"
    id_name = "id"
    logprobs_body = staticmethod(completion_logprobs)
    prompt_at_top = False

    def choice(self, last: ChoiceDelta, text: str) -> dict[str, Any]:
        """Returns a choice with its text."""
        return {"index": last.index, "text": text, "logprobs": None, "finish_reason": last.finish_reason}

    def chunk_choices(self, delta: ChoiceDelta, is_first: bool) -> list[dict[str, Any]]:
        """Returns one choice with the new text, or no choice if there is no text and no finish reason."""
        if not delta.text and delta.finish_reason is None:
            return []
        return [self.choice(delta, delta.text)]


class ChatShape:
    """Form of `/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_name = "id"
    logprobs_body = staticmethod(chat_logprobs)
    prompt_at_top = True

    def choice(self, last: ChoiceDelta, text: str) -> dict[str, Any]:
        """Returns a choice with its message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": last.index, "message": message, "logprobs": None, "finish_reason": last.finish_reason}

    def chunk_choices(self, delta: ChoiceDelta, is_first: bool) -> list[dict[str, Any]]:
        """Returns up to three choices: the role (in the first delta), the new text, and the finish reason with an empty
        delta.
        """
        choices = []
        if is_first:
            choices.append(self._chunk_choice(delta.index, {"role": "assistant", "content": ""}, None))
        if delta.text:
            choices.append(self._chunk_choice(delta.index, {"content": delta.text}, None))
        if delta.finish_reason is not None:
            choices.append(self._chunk_choice(delta.index, {}, delta.finish_reason))
        return choices

    @staticmethod
    def _chunk_choice(index: int, delta: dict[str, str], finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def chat_shape(generation: Generation) -> ResponseShape:
    """Returns the form of a chat's answer: the form that belongs to the parsers if there are any, else `ChatShape`."""
    return ChatShape() if generation.new_shape is None else generation.new_shape(generation)


class Totals:
    """Running sums over the choices of one request."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_running = len(generation.choices)
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._metrics: SpeculationMetrics | None = None
        self._timings = Timings(len(generation.choices))

    def add(self, delta: ChoiceDelta) -> None:
        """Adds a delta to the sums."""
        self._timings.add(delta.index, delta.num_tokens, delta.queue_s)
        self._num_completion_tokens += delta.num_tokens
        self._num_running -= delta.finish_reason is not None
        if delta.index % self._generation.choices_per_prompt == 0:
            # A prompt's tokens and its tokens from the prefix cache are counted once, however many choices the prompt
            # has.
            self._num_cached_tokens += delta.num_cached_tokens
        if delta.metrics is not None:
            self._metrics = self._metrics or SpeculationMetrics()
            self._metrics.add(delta.metrics)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return self._num_running == 0

    def usage(self) -> dict[str, Any]:
        """Returns OpenAI's `usage` so far, in tokens; cached tokens are included only after all choices have ended."""
        num_prompt_tokens = self._generation.num_prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
        }
        if self.complete:
            cached = {"cached_tokens": self._num_cached_tokens}
            usage["prompt_tokens_details"] = cached | self._generation.prompt_details
        return usage

    def metrics(self) -> dict[str, Any]:
        """Returns the extension `metrics`: timings and `speculative_decoding`.

        `speculative_decoding` is null if each choice was ended by a stop string before its engine had reported metrics.
        """
        speculation = None if self._metrics is None else self._metrics.as_dict(self._generation.num_spec_tokens)
        return {"speculative_decoding": speculation, **self._timings.as_dict()}


async def whole_response(
    generation: Generation, deltas: AsyncGenerator[ChoiceDelta, None], shape: ResponseShape
) -> dict[str, Any]:
    """Collects all choices into one body."""
    totals = Totals(generation)
    rounds, details = HeldRounds(), _details(generation, shape)
    texts: list[list[str]] = [[] for _ in generation.choices]
    last: dict[int, ChoiceDelta] = {}
    weights = ""
    async with aclosing(deltas):
        async for delta in deltas:
            totals.add(delta)
            rounds.hold(delta.index, delta.rounds)
            details.hold(delta)
            texts[delta.index].append(delta.text)
            last[delta.index] = delta
            weights = delta.weights
    choices = [shape.choice(last[index], "".join(text)) for index, text in enumerate(texts)]
    top: dict[str, Any] = {}
    for choice in choices:
        choice.update(dict.fromkeys(OF_CHOICE))
        rounds.hand_over(choice)
        of_prompt = {**dict.fromkeys(OF_PROMPT), **details.hand_over(choice)}
        top = top or of_prompt
        choice.update({} if shape.prompt_at_top else of_prompt)
        choice["stop_reason"] = last[choice["index"]].stop_reason
    return {
        **_header(generation, shape, shape.object_name),
        "system_fingerprint": generation.fingerprint(weights),
        "choices": choices,
        "usage": totals.usage(),
        "metrics": totals.metrics(),
        **(top if shape.prompt_at_top else {}),
    }


async def event_stream(
    generation: Generation,
    deltas: AsyncGenerator[ChoiceDelta, None],
    shape: ResponseShape,
    request_id: str,
    turn: asyncio.Lock,
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events, in one piece per delta, or in several pieces if a delta is long. The last chunk has
    `metrics`.

    Args:
        request_id: `X-Request-Id` of the answer, for the log.
        turn: lock held while a piece of a long delta is made; see `paced`.

    Raises:
        Exception: any error of `deltas` before the first event, so that the error can become an HTTP status. A later
            error is sent as an event.
    """
    made, sent = _Chunks(generation, shape), False
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                chunks = made.of(delta)
                sent = sent or bool(chunks)
                if generation.has_lists:
                    async for piece in paced(json_pieces(_events(chunks)), turn):
                        yield piece
                elif chunks:
                    yield b"".join(map(sse_event, chunks))
    except Exception as error:
        if not sent:
            raise
        log_failure(error, request_id)
        yield sse_event(as_api_error(error).body())
    yield DONE


class _Chunks:
    """Makes the chunks of one stream, delta by delta."""

    def __init__(self, generation: Generation, shape: ResponseShape) -> None:
        self._generation, self._shape = generation, shape
        self._header = _header(generation, shape, shape.chunk_object_name)
        if generation.include_usage:
            self._header["usage"] = None
        self._totals, self._rounds, self._details = Totals(generation), HeldRounds(), _details(generation, shape)
        self._started: set[int] = set()

    def of(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Returns the chunks that carry a delta; none if the delta has nothing to show yet."""
        totals = self._totals
        totals.add(delta)
        self._header["system_fingerprint"] = self._generation.fingerprint(delta.weights)
        choices = self._shape.chunk_choices(delta, is_first=delta.index not in self._started)
        self._started.add(delta.index)
        self._rounds.hold(delta.index, delta.rounds)
        self._details.hold(delta)
        chunks = [{**self._header, "choices": [choice]} for choice in choices]
        if choices:
            self._rounds.hand_over(choices[-1])
            carrier = _carrier(choices)
            of_prompt = self._details.hand_over(choices[carrier])
            if delta.finish_reason is not None:
                choices[-1]["stop_reason"] = delta.stop_reason
            if not self._shape.prompt_at_top:
                choices[carrier].update(of_prompt)
            elif delta.index == 0:
                chunks[carrier].update(of_prompt)
        if self._generation.continuous_usage:
            chunks = [{**chunk, "usage": totals.usage()} for chunk in chunks]
        if totals.complete:
            if self._generation.include_usage:
                chunks.append({**self._header, "choices": [], "usage": totals.usage()})
            chunks[-1]["metrics"] = totals.metrics()
        return chunks


def sse_event(body: dict[str, Any]) -> bytes:
    """Returns one server-sent event. Its JSON is ASCII, because some clients split lines at U+2028."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _events(bodies: Iterable[dict[str, Any]]) -> Iterator[str]:
    for body in bodies:
        yield "data: "
        yield from fragments(body)
        yield "\n\n"


def _details(generation: Generation, shape: ResponseShape) -> HeldDetails:
    return HeldDetails(generation.details, generation.choices, shape.logprobs_body, generation.choices_per_prompt)


def _carrier(choices: list[dict[str, Any]]) -> int:
    """Returns the index of the chunk that carries the details about tokens: the first chunk that has text, or the last
    chunk if no chunk has text.
    """
    with_text = (index for index, choice in enumerate(choices) if choice.get("delta", {}).get("content"))
    return next(with_text, len(choices) - 1)


def _header(generation: Generation, shape: ResponseShape, object_name: str) -> dict[str, Any]:
    return {
        shape.id_name: generation.response_id,
        "object": object_name,
        "created": generation.created,
        "model": generation.model,
        "seed": generation.seed,
    }
