"""Computes embeddings: tokenises inputs, runs one request for each, and normalises pooled states to length 1."""

import asyncio
import base64
import json
import uuid
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import numpy as np

from wingbeat.deployments.api.answers.generation import Prompt
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ApiError, invalid, prompt_too_long
from wingbeat.deployments.embeddings.body import EmbeddingsBody
from wingbeat.deployments.embeddings.settings import NO_EMBEDDINGS
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.request_context import session_id
from wingbeat.runtime.scheduling.request import Request, SamplingParams, Variant

EMBEDDING_BYTES, FLOAT_BYTES, BASE64_BYTES = 64, 24, 6
"""Upper bounds of bytes in JSON: for an embedding without its numbers, for each number in decimal form, and for each
number in base64.
"""


class Embeddings:
    """Answers `/v1/embeddings` with the engines of one model.

    Args:
        service: the model's service, whose dict `of_parts` holds the `EmbeddingKind`.
    """

    def __init__(self, service: CompletionService) -> None:
        self._pool, self._prompts = service.pool, service.prompts
        self._figures: Any = service.figures
        self._sizes = service.sizes
        self.kind = service.of_parts.get("embeddings", NO_EMBEDDINGS)

    async def answer(self, body: EmbeddingsBody) -> bytes:
        """Compute the embeddings and return the whole answer as JSON.

        Raises:
            ApiError: the model has no embeddings, an input does not fit the model, or the answer would be too long.
            EngineOverloaded: the engines' queues cannot hold a batch of inputs, or the router's memory for answers
                cannot hold the answer.
            EngineUnavailable, RequestFailed, RequestRefused: an input could not be embedded.
        """
        name = self._pool.info.model_name
        variant = self._prompts.variant_of(body.model)
        if self.kind.pooling is None:
            problem = f"{name!r} is not served as an embedding model; set 'embeddings' of the server to mean or last"
            raise ApiError(f"The model {problem}.", param="model", code="unsupported_model")
        if body.dimensions is not None and not self.kind.can_be_cut:
            raise invalid("dimensions", f"is {body.dimensions}: embeddings of {name!r} cannot be shortened")
        prompts = await self._prompts.off_loop.run(sum(map(len, body.input)), self._read, body)
        self._check(prompts)
        with self._sizes.held(self._answer_bytes(body)):
            return await self._embedded(prompts, body, variant)

    async def _embedded(self, prompts: Sequence[Prompt], body: EmbeddingsBody, variant: Variant | None) -> bytes:
        params = SamplingParams(
            1, 0.0, report=self.kind.pooling, speculation=False, ignore_eos=True, priority=body.priority or 0
        )
        unique_id = f"embd-{uuid.uuid4().hex}"
        requests = [
            Request(f"{unique_id}-{index}", prompt.token_ids, params, variant=variant)
            for index, prompt in enumerate(prompts)
        ]
        found: list[bytes] = []
        at_once = self._pool.max_num_seqs
        for begin in range(0, len(requests), at_once):
            found += await self._run(requests[begin : begin + at_once])
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        model = self._pool.info.model_name if variant is None else variant.name
        answer = {"id": unique_id, "object": "list", "model": model, "usage": usage}
        # The answer is written in a thread, because encoding thousands of numbers per input on the event loop would
        # delay the streams of other requests.
        return await asyncio.to_thread(lambda: _json(answer | {"data": _written(found, body)}))

    def _read(self, body: EmbeddingsBody) -> list[Prompt]:
        """Return the prompts of the inputs, in order; raises ApiError if an input does not fit into the model's
        context.
        """
        adds = body.add_special_tokens is not False
        return [Prompt(self._prompts.tokens(text, body, "input", adds)[0]) for text in body.input]

    def _answer_bytes(self, body: EmbeddingsBody) -> int:
        """Return an upper bound of the answer's bytes.

        Raises ApiError, 400, if the bound exceeds the server's limit.
        """
        most = self.kind.num_numbers
        numbers = most if body.dimensions is None else min(body.dimensions, most)
        each = BASE64_BYTES if body.encoding_format == "base64" else FLOAT_BYTES
        total = len(body.input) * (EMBEDDING_BYTES + numbers * each)
        if total > (limit := self._sizes.max_bytes):
            message = (
                f"'input' asks for too long an answer: {len(body.input)} embeddings of {numbers} numbers could make "
                f"{total} bytes, and this server answers by {limit} at most (max_answer_bytes). Send several requests."
            )
            raise ApiError(message, param="input", code="answer_too_long")
        return total

    def _check(self, prompts: Sequence[Prompt]) -> None:
        limit = self._pool.info.max_model_len - 1
        for prompt in prompts:
            if not prompt.token_ids:
                raise invalid("input", "holds an empty text: at least one token is needed")
            if len(prompt.token_ids) > limit:
                raise prompt_too_long("input", limit, len(prompt.token_ids))

    async def _run(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the embeddings in the order of the requests; if a request fails, the other requests are aborted."""
        admission = self._pool.admit(len(requests))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(request)) for request in requests]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            admission.release()

    async def _one(self, request: Request) -> bytes:
        embedding = b""
        figures, longest = self._figures, self._pool.info.max_model_len
        with nullcontext() if figures is None else figures.watch(request, longest) as watch:
            async with aclosing(self._pool.generate(request, session_id())) as outputs:
                async for output in outputs:
                    embedding = embedding or output.report
                    if watch is not None:
                        watch.took(0, output.engine_id, output.queue_s)
            if not embedding:
                raise EngineUnavailable("The engine ended the request before it was complete.")
            if watch is not None:
                watch.end = "stop"
        return embedding


def _json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def _written(found: list[bytes], body: EmbeddingsBody) -> list[dict[str, Any]]:
    """Return the embeddings as objects of the answer.

    Raises:
        ApiError: 400, more dimensions are requested than the embeddings have.
    """
    numbers = np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1)
    if body.dimensions is not None:
        if body.dimensions > numbers.shape[1]:
            raise invalid("dimensions", f"is {body.dimensions}: embeddings have {numbers.shape[1]} numbers")
        numbers = numbers[:, : body.dimensions]
    lengths = np.sqrt(np.square(numbers.astype(np.float64)).sum(axis=1, keepdims=True))
    numbers = (numbers / np.maximum(lengths, 1e-12)).astype("<f4")
    return [
        {"object": "embedding", "index": index, "embedding": _encoded(row, body)} for index, row in enumerate(numbers)
    ]


def _encoded(row: np.ndarray, body: EmbeddingsBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(row.tobytes()).decode()
    return row.tolist()
