"""Limits of docs/http_api.md on the length of an answer with reports on tokens."""

from typing import Any

from .contract import CHAT, CONTEXT
from .findings import Findings
from .rules import as_prompts

MAX_ANSWER_BYTES = 32 * 2**20
LOGPROB, TOKEN_ID, ECHOED, ROUND = 96, 8, 8, 2048
"""Bytes that each counts."""


def check_size(path: str, body: dict[str, Any], num_prompt_tokens: int | None, found: Findings) -> None:
    """An answer that may be longer is refused by a field that asks for some of it.

    Args:
        num_prompt_tokens: of all prompts, None where the document does not fix it.
    """
    asked = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    num_prompts = 1 if path == CHAT else len(as_prompts(body["prompt"]) or [])
    most_prompt = num_prompts * CONTEXT if num_prompt_tokens is None else num_prompt_tokens
    if asked is not None and not isinstance(asked, int):
        return  # refused by the rules of its own field
    # A default length is cut to what fits.
    num_answer = num_prompts * (1 if asked is None else asked) * (not body.get("stream"))
    costs = {
        field: prompt * most_prompt + answer * num_answer for field, (prompt, answer) in _costs(path, body).items()
    }
    total = (body.get("n") or 1) * sum(costs.values())
    # The words of a template are counted by the token, what it adds is not.
    if total > MAX_ANSWER_BYTES * 0.9:
        for field in filter(costs.get, costs):
            found.open(field, "answer_too_long")
    if total > MAX_ANSWER_BYTES * 1.1 and num_prompt_tokens is not None:
        found.must_fail = True


def _costs(path: str, body: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By field, bytes of a prompt's token and of an answer's."""
    top, echo = body.get("logprobs"), bool(body.get("echo"))
    name = "logprobs"
    if path == CHAT:
        name, top = "top_logprobs", (body.get("top_logprobs") or 0) if top else None
    of_answer = 0 if top is None or top is False else LOGPROB * (1 + top)
    of_prompt = 0 if body.get("prompt_logprobs") is None else LOGPROB * (1 + body["prompt_logprobs"])
    ids = TOKEN_ID * bool(body.get("return_token_ids"))
    trace = ROUND * bool((body.get("speculation") or {}).get("trace"))
    return {
        name: (of_answer * echo, of_answer),
        "prompt_logprobs": (of_prompt, 0),
        "return_token_ids": (ids, ids),
        "echo": (ECHOED * echo, 0),
        "speculation.trace": (0, trace),
    }
