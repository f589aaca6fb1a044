"""What an answer says of its tokens beside their text: ids, log-probabilities, and those of the prompt."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from wingbeat.deployments.api.answers.generation import ChoiceDelta, Details
from wingbeat.runtime.scheduling.request import TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM writes this too."""


class Entry(NamedTuple):
    """One token; the first one of a prompt has no log-probability."""

    token_id: int
    logprob: TokenLogprob | None

    def with_top(self, count: int) -> "Entry":
        """With so many of the most likely tokens, at most."""
        return (
            self if self.logprob is None else Entry(self.token_id, self.logprob._replace(top=self.logprob.top[:count]))
        )


def finite(logprob: float) -> float:
    """The log-probability, or `LEAST_LOGPROB` where it is smaller."""
    return max(logprob, LEAST_LOGPROB)


class LogprobsBody(Protocol):
    """How an endpoint writes log-probabilities."""

    def __call__(self, details: Details, entries: list[Entry], offset: int) -> dict[str, Any]:
        """The field `logprobs` of a choice.

        Args:
            offset: characters of the tokens before these.
        """
        ...


def completion_logprobs(details: Details, entries: list[Entry], offset: int) -> dict[str, Any]:
    """OpenAI's four lists of `/v1/completions`; the chosen token is among the top ones, as in vLLM."""
    names = [details.name(entry.token_id) for entry in entries]
    lengths = [len(details.text(entry.token_id)) for entry in entries]
    offsets = accumulate(lengths[:-1], initial=offset)
    return {
        "tokens": names,
        "token_logprobs": [entry.logprob and finite(entry.logprob.logprob) for entry in entries],
        "top_logprobs": [
            entry.logprob
            and {
                **{details.name(token_id): finite(value) for token_id, value in reversed(entry.logprob.top)},
                name: finite(entry.logprob.logprob),
            }
            for name, entry in zip(names, entries, strict=True)
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(details: Details, entries: list[Entry], offset: int) -> dict[str, Any]:
    """OpenAI's list of `/v1/chat/completions`."""

    def body(token_id: int, logprob: float) -> dict[str, Any]:
        text = details.text(token_id).encode("utf-8", "replace")
        return {"token": details.name(token_id), "logprob": finite(logprob), "bytes": list(text)}

    content = [
        {
            **body(entry.token_id, entry.logprob.logprob),
            "top_logprobs": [body(token_id, value) for token_id, value in entry.logprob.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(details: Details, entries: Sequence[Entry]) -> list[dict[str, Any] | None]:
    """vLLM's field: by token, {token id: {logprob, decoded_token}} of itself and of the most likely ones."""
    return [
        entry.logprob
        and {
            str(token_id): {"logprob": finite(value), "decoded_token": details.text(token_id)}
            for token_id, value in ((entry.token_id, entry.logprob.logprob), *entry.logprob.top)
        }
        for entry in entries
    ]


class HeldDetails:
    """Details of a request's choices until a body is written that they can go into."""

    def __init__(self, details: Details, prompts: Sequence[Sequence[int]], as_body: LogprobsBody) -> None:
        """`prompts` holds each choice's."""
        self._details, self._prompts, self._as_body = details, prompts, as_body
        self._entries: dict[int, list[Entry]] = defaultdict(list)
        self._token_ids: dict[int, list[int]] = defaultdict(list)
        self._of_prompt: dict[int, list[Entry]] = {}
        self._offsets: dict[int, int] = defaultdict(int)
        self._told: set[int] = set()

    def hold(self, delta: ChoiceDelta) -> None:
        """Keep what a delta says of its tokens."""
        index, details = delta.index, self._details
        if details.token_ids:
            self._token_ids[index] += delta.token_ids
        if delta.prompt_logprobs:
            own = (None, *delta.prompt_logprobs)
            self._of_prompt[index] = [Entry(*pair) for pair in zip(self._prompts[index], own, strict=True)]
        elif details.prompt_logprobs or details.echo:
            # A prompt of one token has nothing before it.
            self._of_prompt.setdefault(index, [Entry(token_id, None) for token_id in self._prompts[index][:1]])
        if details.logprobs:
            if details.echo and index not in self._told and not self._entries[index]:
                self._entries[index] += [entry.with_top(details.num_top) for entry in self._of_prompt[index]]
            self._entries[index] += [Entry(*pair) for pair in zip(delta.token_ids, delta.logprobs, strict=True)]

    def hand_over(self, choice: dict[str, Any]) -> None:
        """Write what is held for a choice into its body."""
        index, details = choice["index"], self._details
        entries = self._entries.pop(index, [])
        if entries:
            choice["logprobs"] = self._as_body(details, entries, self._offsets[index])
            self._offsets[index] += sum(len(details.text(entry.token_id)) for entry in entries)
        is_first = index not in self._told
        self._told.add(index)
        if details.token_ids:
            choice["token_ids"] = self._token_ids.pop(index, [])
            if is_first:
                choice["prompt_token_ids"] = list(self._prompts[index])
        if details.prompt_logprobs and is_first:
            entries = [entry.with_top(details.num_prompt_top) for entry in self._of_prompt[index]]
            choice["prompt_logprobs"] = prompt_logprobs(details, entries)
