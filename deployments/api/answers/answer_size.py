"""Limits the bytes of details about tokens (log-probabilities, token ids, rounds), for each answer and for all answers
together. The limits are checked before anything is generated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.limits import MAX_ANSWER_BYTES

if TYPE_CHECKING:
    from wingbeat.deployments.api.bodies.requests import GenerationBody

ANSWERS_AT_ONCE = 4
"""Number of answers of maximum size that a router may hold at once."""

_LOGPROB, _TOKEN_ID, _TEXT, _ROUND = 96, 8, 8, 2048
"""Estimated bytes of JSON, in this order: a log-probability with its token, a token id, a token's text, a round with
its draft tree.
"""


class _Cost(NamedTuple):
    """Bytes of JSON that one field of the request adds to the answer."""

    field: str
    prompt: int
    """Bytes for each prompt token in each choice."""
    answer: int
    """Bytes for each generated token."""


class AnswerSizes:
    """Limits the bytes of details about tokens, for each request and for all requests of a router together.

    Args:
        max_bytes: maximum bytes of one answer's details.
    """

    def __init__(self, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_held_bytes = 0
        """Bytes reserved for answers that have not been sent."""

    def most_tokens(self, body: "GenerationBody", num_prompt_tokens: Sequence[int], most: int) -> int:
        """Returns the maximum number of tokens per choice: `most`, or a smaller number (at least 1) if the details
        would otherwise exceed `max_bytes`.
        """
        by_token = sum(cost.answer for cost in _costs(body)) * body.num_choices * len(num_prompt_tokens)
        if not by_token:
            return most
        rest = self.max_bytes - sum(cost.prompt for cost in _costs(body)) * body.num_choices * sum(num_prompt_tokens)
        return max(1, min(most, rest // by_token))

    def check(self, body: "GenerationBody", num_prompt_tokens: Sequence[int], max_tokens: int) -> int:
        """Checks that an answer's details cannot exceed the limit. Returns the maximum bytes of details that are held
        until the answer is sent.

        Args:
            num_prompt_tokens: tokens of each prompt.
            max_tokens: maximum tokens per choice.

        Raises:
            ApiError: 400, the details could exceed the limit. The error names the field that adds the most bytes.
        """
        num_prompt, num_answer = sum(num_prompt_tokens), max_tokens * len(num_prompt_tokens) * body.num_choices
        of_prompts = {cost.field: cost.prompt * num_prompt for cost in _costs(body)}
        of_answers = {cost.field: cost.answer * num_answer for cost in _costs(body)}
        costs = {field: of_prompts[field] * body.num_choices + of_answers[field] for field in of_prompts}
        total = sum(costs.values())
        if total > self.max_bytes:
            param = max(costs, key=costs.__getitem__)
            prompts = f"{len(num_prompt_tokens)} prompts of {num_prompt}" if len(num_prompt_tokens) > 1 else num_prompt
            message = (
                f"'{param}' asks for too long an answer: n {body.num_choices} x ({prompts} prompt tokens and "
                f"{max_tokens} of {body.limit_field}) could make {total} bytes of {', '.join(costs)}, and this server "
                f"answers by {self.max_bytes} at most (max_answer_bytes). Lower one of them, or send several requests."
            )
            raise ApiError(message, param=param, code="answer_too_long")
        # The details about a prompt are the same in all its choices, so they are held only once.
        return sum(of_prompts.values()) + sum(of_answers.values())

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Context in which an answer's bytes are reserved.

        Raises:
            EngineOverloaded: too many bytes are reserved for other answers at the moment.
        """
        if self.num_held_bytes + num_bytes > ANSWERS_AT_ONCE * self.max_bytes:
            raise EngineOverloaded("There is no room for more answers as long as this one now. Retry shortly.")
        self.num_held_bytes += num_bytes
        try:
            yield
        finally:
            self.num_held_bytes -= num_bytes


def _costs(body: "GenerationBody") -> Iterator[_Cost]:
    # In a stream, the details of a token are sent with the token, so none are held.
    holds = not body.stream
    if body.asked_logprobs is not None:
        by_token = _LOGPROB * (1 + body.asked_logprobs)
        yield _Cost(body.logprobs_field, by_token * body.echoes, by_token * holds)
    if body.prompt_logprobs is not None:
        yield _Cost("prompt_logprobs", _LOGPROB * (1 + body.prompt_logprobs), 0)
    if body.return_token_ids:
        yield _Cost("return_token_ids", _TOKEN_ID, _TOKEN_ID * holds)
    if body.echoes:
        yield _Cost("echo", _TEXT, 0)
    if body.speculation is not None and body.speculation.trace:
        yield _Cost("speculation.trace", 0, _ROUND * holds)
