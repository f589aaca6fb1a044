"""Turns checked request bodies into text: tokenizes prompts, plans choices, runs choices on engines, streams text."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from wingbeat.deployments.api.answers.answer_size import AnswerSizes
from wingbeat.deployments.api.answers.generation import (
    Choice,
    ChoiceDelta,
    Details,
    Generation,
    Prompt,
    take_rounds,
)
from wingbeat.deployments.api.answers.merging import first_choices_first, merged
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import (
    CompletionBody,
    GenerationBody,
    SpeculationOptions,
)
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.api.prompts import PromptReader, Prompts
from wingbeat.deployments.fleet.engine_pool import EnginePool, Reservation
from wingbeat.deployments.fleet.interface import EngineUnavailable, RequestRefused
from wingbeat.deployments.limits import MAX_ANSWER_BYTES
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.request_context import session_id
from wingbeat.runtime.scheduling.request import FinishReason, Request
from wingbeat.runtime.text_stream import StreamedText, TextStream
from wingbeat.runtime.tokenizer import Tokenizer

_NOTHING = StreamedText("", 0, stopped=False)


class ChatReader(Protocol):
    """Adds parsers of tool calls and reasoning to the `Generation` of a chat; may also choose the JSON form of the
    answer.
    """

    def describe(self) -> str:
        """Returns a line that names the parsers, for the log at start."""
        ...

    def read(self, body: ChatBody, prompt: Prompt, generation: Generation) -> Generation:
        """Returns the generation with parsers added; raises ApiError if the parsers cannot serve the request."""
        ...


class ClientFigures(Protocol):
    """Measures choices, see the hook `router_figures`."""

    def measured(
        self, deltas: AsyncGenerator[ChoiceDelta, None], request: Request, max_model_len: int, num_choices: int
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields the deltas of a choice. `num_choices` is `n` if the choice is the first of its prompt, else 0."""
        ...


class CompletionService:
    """Answers checked requests on the engines of one model."""

    def __init__(
        self,
        pool: EnginePool,
        tokenizer: Tokenizer,
        chat_reader: ChatReader | None = None,
        figures: ClientFigures | None = None,
        prompt_reader: PromptReader | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        takes_templates: bool = False,
        aliases: Sequence[str] = (),
        beside: "CompletionService | None" = None,
        of_parts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Makes the service.

        Args:
            aliases: further names of the model, without its first name.
            beside: another service of the same router, from which this service takes `sizes` (limit on the bytes of
                held answers) and `turn`, so that the services share them.
            of_parts: objects, by name, that the routes of optional parts use; see the hook `surface` in
                `wingbeat.deployments.parts`.
        """
        self.pool = pool
        self.sizes = AnswerSizes(max_answer_bytes) if beside is None else beside.sizes
        self.speculates = True
        """Whether drafts are made for requests that have no field `speculation`."""
        self.turn = asyncio.Lock() if beside is None else beside.turn
        """Lock held while a piece of a long answer is made; see `paced` in
        `wingbeat.deployments.api.answers.json_pieces`.
        """
        self.prompts = Prompts(pool, tokenizer, prompt_reader, takes_templates, aliases)
        self.tokenizer = tokenizer
        self._reader = chat_reader
        self.figures = figures
        self.of_parts = of_parts

    async def plan_completion(self, body: CompletionBody) -> Generation:
        """Tokenizes the prompts and fixes every choice's parameters.

        Raises:
            ApiError: the model is not served here, or a prompt and `max_tokens` together exceed its context.
        """
        self.check_model(body.model)
        self._check_choices(len(body.prompt), body.num_choices)
        return self._plan(body, await self.prompts.of_completion(body), "cmpl", body.default_max_tokens)

    async def plan_chat(self, body: ChatBody) -> Generation:
        """Applies the chat template, tokenizes the prompt and fixes every choice's parameters.

        Raises ApiError as `plan_completion` does, and if the chat template refuses the messages.
        """
        body = self.prompts.continued(body)
        self._check_choices(1, body.num_choices)
        prompt = await self.prompts.of_chat(body)
        generation = self._plan(body, [prompt], "chatcmpl", None)
        return generation if self._reader is None else self._reader.read(body, prompt, generation)

    async def run(self, generation: Generation) -> AsyncGenerator[ChoiceDelta, None]:
        """Generates all choices concurrently; yields their deltas in order of arrival.

        Closing the generator early aborts the choices that are still running. After any error but EngineOverloaded, the
        other choices are aborted.

        Raises:
            EngineOverloaded: the engines' queues cannot hold all choices; no choice was started.
            ApiError: an engine refused a choice.
            EngineUnavailable, RequestFailed: a choice could not be generated.
        """
        admission = self.pool.admit(len(generation.choices))
        try:
            with self.prompts.held(generation.choices[0].request.spans):
                streams = [
                    self._measured(choice, self._run_choice(choice, admission), generation.choices_per_prompt)
                    for choice in generation.choices
                ]
                deltas = streams[0] if len(streams) == 1 else merged(streams)
                if generation.shares_prompt:
                    deltas = first_choices_first(deltas, generation.choices_per_prompt)
                async with aclosing(deltas):
                    async for delta in deltas:
                        yield delta
        except RequestRefused as error:
            field, _, problem = str(error).partition(" ")
            # In an engine's errors every input is called "prompt", but the error that the client gets must name the
            # field of the request.
            raise invalid(generation.prompt_field if field == "prompt" else field, problem.removesuffix(".")) from error
        finally:
            admission.release()

    def check_model(self, model: str | None) -> None:
        """Raises ApiError, 404, if `model` names neither this model nor one of its variants."""
        self.prompts.variant_of(model)

    def _check_choices(self, num_prompts: int, num_choices: int) -> None:
        limit = self.pool.max_requests
        if num_prompts * num_choices > limit:
            param = "n" if num_prompts == 1 or num_choices > limit else "prompt"
            problem = f"asks for {num_prompts * num_choices} choices, but this server takes at most {limit} at once"
            raise invalid(param, problem)

    def _plan(
        self, body: GenerationBody, prompts: Sequence[Prompt], prefix: str, default_max_tokens: int | None
    ) -> Generation:
        unique_id, variant = f"{prefix}-{uuid.uuid4().hex}", self.prompts.variant_of(body.model)
        # The seed stays below 2^53 even after a choice's index is added, so that JSON parsers that store numbers as
        # doubles represent the seed exactly.
        seed = body.seed if body.seed is not None else secrets.randbelow(2**53 - 2**16)
        asked = body.speculation or SpeculationOptions(enabled=self.speculates)
        shared = body.sampling_params(
            self.pool.info.vocab_size,
            self.tokenizer,
            speculation=asked.enabled,
            learn=asked.learn,
            trace=asked.trace,
            force_drafts=asked.force,
        )
        choices, lengths = [], [len(prompt.token_ids) for prompt in prompts]
        spans = [span for prompt in prompts for span in prompt.spans]
        limits = [self._max_tokens(length, body, default_max_tokens) for length in lengths]
        if body.asked_max_tokens is None:
            limits = [self.sizes.most_tokens(body, lengths, limit) for limit in limits]
        answer_bytes = self.sizes.check(body, lengths, max(*limits, body.min_tokens or 0))
        for prompt, max_tokens in zip(prompts, limits, strict=True):
            for sample in range(body.num_choices):
                # An engine always generates at least one token, so with max_tokens 0 it is asked for one token.
                params = replace(shared, max_tokens=max(1, max_tokens), seed=_wrap_int64(seed + sample))
                if sample:
                    # Only the first choice of a prompt reports the prompt's log-probabilities.
                    params = replace(params, prompt_logprobs=None)
                request = Request(
                    f"{unique_id}-{len(choices)}", prompt.token_ids, params, variant=variant, spans=prompt.spans
                )
                choices.append(_choice(len(choices), request, body, prompt, is_echo_alone=max_tokens == 0))
        return Generation(
            response_id=unique_id if body.request_id is None else f"{prefix}-{body.request_id}",
            created=int(time.time()),
            model=self.pool.info.model_name if variant is None else variant.name,
            seed=seed,
            choices=tuple(choices),
            choices_per_prompt=body.num_choices,
            num_prompt_tokens=sum(lengths),
            prompt_details=first_result("prompt_details", spans) if spans else {},
            answer_bytes=answer_bytes,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            details=Details(
                self.tokenizer,
                logprobs=body.asked_logprobs is not None,
                echo=body.asked_logprobs is not None and body.echoes,
                prompt_logprobs=body.prompt_logprobs is not None,
                num_top=body.asked_logprobs or 0,
                num_prompt_top=body.prompt_logprobs or 0,
                token_ids=bool(body.return_token_ids),
                names_by_id=bool(body.return_tokens_as_token_ids),
            ),
            text_identity=self.pool.info.text_identity,
            prompt_field=body.prompt_field,
            num_spec_tokens=self.pool.info.num_spec_tokens,
        )

    def _max_tokens(self, num_prompt_tokens: int, body: GenerationBody, default: int | None) -> int:
        """Returns the maximum tokens to generate; raises ApiError if the caller's maximum does not fit into the
        context.

        If the caller gives no maximum, `default` is used, lowered to the number of tokens that fit.
        """
        limit, asked = self.pool.info.max_model_len, body.asked_max_tokens
        rest = limit - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise invalid(body.prompt_field, "is empty: at least one token is needed")
        if rest < 1 or (asked is not None and asked > rest):
            wanted = f" and {asked} for the answer" if asked is not None else ""
            message = (
                f"This model's maximum context length is {limit} tokens, but the request has {num_prompt_tokens} "
                f"tokens in the prompt{wanted}. Shorten the prompt or lower {body.limit_field}."
            )
            param = body.prompt_field if rest < 1 else body.limit_field
            raise ApiError(message, param=param, code="context_length_exceeded")
        most = asked if asked is not None else rest if default is None else min(default, rest)
        if (body.min_tokens or 0) > most:
            raise invalid("min_tokens", f"is {body.min_tokens}, more than the {most} tokens the answer can have")
        return most

    async def _run_choice(self, choice: Choice, admission: Reservation) -> AsyncGenerator[ChoiceDelta, None]:
        params = choice.request.params
        stream = TextStream(
            self.tokenizer,
            choice.request.prompt_token_ids,
            choice.stops,
            skip_special_tokens=choice.skip_special_tokens,
            include_stop=choice.include_stop,
            min_tokens=params.min_tokens,
            echoes=bool(choice.echo) and not choice.is_echo_alone,
        )
        prefix, metrics, finish = choice.echo.removesuffix(stream.context_rest), None, None
        async with aclosing(self.pool.generate(choice.request, session_id())) as outputs:
            async for output in outputs:
                metrics = output.metrics or metrics
                if choice.is_echo_alone:
                    got, finish, rounds = _NOTHING, output.finish_reason, ()
                elif output.rounds:
                    hidden = self.pool.info.drafts_from_other_requests
                    got, finish, rounds = take_rounds(self.tokenizer, stream, output, hides_rejected=hidden)
                else:
                    (got, finish), rounds = stream.take(output.token_ids, output.finish_reason), ()
                text, prefix = prefix + got.text, ""
                delta = ChoiceDelta(
                    choice.index,
                    text,
                    got.num_tokens,
                    rounds=rounds,
                    logprobs=output.logprobs[: got.num_tokens],
                    prompt_logprobs=output.prompt_logprobs,
                    token_ids=output.token_ids[: got.num_tokens],
                    engine_id=output.engine_id,
                    weights=output.weights,
                    queue_s=output.queue_s,
                )
                if finish is not None:
                    break
                yield delta
        admission.release(1)
        if finish is None:
            raise EngineUnavailable("The engine ended the request before it was complete.")
        stop = stream.stopped_by
        if stop is None and finish is FinishReason.STOP and delta.token_ids[-1:] and params.stop_token_ids:
            stop = delta.token_ids[-1] if delta.token_ids[-1] in params.stop_token_ids else None
        finish = FinishReason.LENGTH if choice.is_echo_alone else finish
        yield delta._replace(
            finish_reason=finish, metrics=metrics, num_cached_tokens=output.num_cached_tokens, stop_reason=stop
        )

    def _measured(
        self, choice: Choice, deltas: AsyncGenerator[ChoiceDelta, None], choices_per_prompt: int
    ) -> AsyncGenerator[ChoiceDelta, None]:
        if self.figures is None:
            return deltas
        num_choices = 0 if choice.index % choices_per_prompt else choices_per_prompt
        return self.figures.measured(deltas, choice.request, self.pool.info.max_model_len, num_choices)


def _choice(index: int, request: Request, body: GenerationBody, prompt: Prompt, *, is_echo_alone: bool) -> Choice:
    return Choice(
        index,
        request,
        body.stops,
        prompt.echo,
        skip_special_tokens=body.skip_special_tokens is not False,
        echo_skips_special=prompt.echo_skips_special,
        include_stop=bool(body.include_stop_str_in_output),
        is_echo_alone=is_echo_alone,
    )


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
