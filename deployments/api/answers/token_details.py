"""Details about tokens that an answer reports: ids and log-probabilities of the tokens of the answer and of the
prompt.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from wingbeat.deployments.api.answers.generation import Choice, ChoiceDelta, Details
from wingbeat.deployments.api.answers.json_pieces import LongList, LongPart, SharedPart
from wingbeat.runtime.scheduling.request import TokenLogprob
from wingbeat.runtime.text_stream import IncrementalDetokenizer
from wingbeat.runtime.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Number written instead of minus infinity, which JSON cannot express; vLLM writes the same number."""


class TextPlaces:
    """Character offsets of successive tokens in the text of a choice."""

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, skips_special: bool, echo: str = ""
    ) -> None:
        """Starts at offset 0. Tokens that the text leaves out add no characters.

        Args:
            before: token ids before the first token, as context for decoding.
            skips_special: whether the text leaves out special tokens.
            echo: text before the tokens' text.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=skips_special)
        self._num_chars = len(echo.removesuffix(self._detokenizer.take_foreign())) if echo else 0

    def next_offset(self, token_id: int) -> int:
        """Returns the offset of the next token, that is, the number of characters that the tokens before it have
        completed.
        """
        place = self._num_chars
        self._num_chars += len(self._detokenizer.push((token_id,)))
        return place


class Reported(NamedTuple):
    """Token ids with their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    """Log-probability of each token; None for a prompt's first token."""
    num_top: int
    """Number of most likely tokens to show for each token."""
    places: TextPlaces
    parts: dict[str, LongPart] | None = None
    """Lists shared by several choices, by name; None if nothing is shared."""

    def part(self, name: str, as_value: "AsValue") -> LongPart:
        """Returns a part of a list. The part has one item for each token; `as_value` makes the item's JSON value. If
        `parts` is set, all calls with the same `name` return the same part.
        """
        tokens = range(len(self.token_ids))
        made = LongPart if self.parts is None else SharedPart

        def value_at(place: int) -> Any:
            logprob = self.logprobs[place]
            if logprob is not None and len(logprob.top) > self.num_top:
                logprob = logprob._replace(top=logprob.top[: self.num_top])
            return as_value(self, self.token_ids[place], logprob)

        if self.parts is None:
            return made(tokens, value_at)
        return self.parts.setdefault(name, made(tokens, value_at))


class OneLater(Sequence[TokenLogprob | None]):
    """Log-probabilities of a prompt's tokens, preceded by None, because the first token of a prompt has no
    log-probability.
    """

    def __init__(self, of_others: Sequence[TokenLogprob]) -> None:
        self._of_others = of_others

    def __len__(self) -> int:
        return 1 + len(self._of_others)

    def __getitem__(self, place: int) -> TokenLogprob | None:
        return self._of_others[place - 1] if place else None


class AsValue(Protocol):
    """Function that returns the JSON value of one token."""

    def __call__(self, reported: Reported, token_id: int, logprob: TokenLogprob | None) -> Any:
        """Returns the token's value in a list."""
        ...


def finite(logprob: float) -> float:
    """Returns the log-probability, raised to `LEAST_LOGPROB` if it is lower."""
    return max(logprob, LEAST_LOGPROB)


class LogprobsBody(Protocol):
    """Function that returns an endpoint's form of log-probabilities."""

    def __call__(self, details: Details, reported: Sequence[Reported]) -> dict[str, Any]:
        """Returns the field `logprobs` of a choice."""
        ...


def completion_logprobs(details: Details, reported: Sequence[Reported]) -> dict[str, Any]:
    """Returns OpenAI's four lists of `/v1/completions`. As in vLLM, `top_logprobs` begins with the chosen token."""

    def top(_: Reported, token_id: int, logprob: TokenLogprob | None) -> dict[str, float] | None:
        if logprob is None:
            return None
        found = {details.name(token_id): finite(logprob.logprob)}
        for other, value in logprob.top:
            found.setdefault(details.name(other), finite(value))
        return found

    columns: dict[str, AsValue] = {
        "tokens": lambda _, token_id, logprob: details.name(token_id),
        "token_logprobs": lambda _, token_id, logprob: logprob and finite(logprob.logprob),
        "top_logprobs": top,
        "text_offset": lambda some, token_id, logprob: some.places.next_offset(token_id),
    }
    return {name: _column(reported, name, as_value) for name, as_value in columns.items()}


def chat_logprobs(details: Details, reported: Sequence[Reported]) -> dict[str, Any]:
    """Returns OpenAI's list of `/v1/chat/completions`."""

    def body(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = details.tokenizer.token_bytes(token_id)
        return {"token": details.name(token_id), "logprob": finite(logprob), "bytes": list(spelled)}

    def entry(_: Reported, token_id: int, logprob: TokenLogprob) -> dict[str, Any]:
        return {**body(token_id, logprob.logprob), "top_logprobs": [body(*other) for other in logprob.top]}

    return {"content": _column(reported, "content", entry), "refusal": None}


def prompt_logprobs(details: Details, reported: Reported) -> LongList:
    """Returns vLLM's field `prompt_logprobs`: for each prompt token a mapping {token id: {logprob, decoded_token}} of
    that token and of the most likely tokens at its position.
    """

    def entry(_: Reported, token_id: int, logprob: TokenLogprob | None) -> dict[str, Any] | None:
        return logprob and {
            str(other): {"logprob": finite(value), "decoded_token": details.text(other)}
            for other, value in ((token_id, logprob.logprob), *logprob.top)
        }

    return LongList(reported.part("prompt_logprobs", entry))


def _column(reported: Iterable[Reported], name: str, as_value: AsValue) -> LongList:
    return LongList(*(some.part(name, as_value) for some in reported))


class HeldDetails:
    """Holds details of a request's choices until a chunk or body is written that can carry them."""

    def __init__(
        self, details: Details, choices: Sequence[Choice], as_body: LogprobsBody, choices_per_prompt: int
    ) -> None:
        self._details, self._choices, self._as_body = details, choices, as_body
        self._prompts = [choice.request.prompt_token_ids for choice in choices]
        self._per_prompt = choices_per_prompt
        self._token_ids: dict[int, list[int]] = defaultdict(list)
        self._logprobs: dict[int, list[TokenLogprob]] = defaultdict(list)
        self._of_prompt: dict[int, Sequence[TokenLogprob | None]] = {}
        self._parts: dict[int, dict[str, LongPart]] = defaultdict(dict)
        """For each prompt (by index), the parts of lists that all choices of the prompt share."""
        self._places: dict[int, TextPlaces] = {}
        self._told: set[int] = set()

    def hold(self, delta: ChoiceDelta) -> None:
        """Adds a delta's details.

        Details about a prompt come with the first delta of the prompt's first choice; this delta arrives before all
        other deltas of the prompt.
        """
        index, details = delta.index, self._details
        if details.token_ids or details.logprobs:
            self._token_ids[index] += delta.token_ids
        if delta.prompt_logprobs:
            self._of_prompt[index // self._per_prompt] = OneLater(delta.prompt_logprobs)
        if details.logprobs:
            self._logprobs[index] += delta.logprobs

    def hand_over(self, choice: dict[str, Any]) -> dict[str, LongList]:
        """Moves the details held for a choice into its body; in the first call for a choice, also returns the prompt's
        details.
        """
        index, details = choice["index"], self._details
        token_ids = self._token_ids.pop(index, [])
        is_first = index not in self._told
        self._told.add(index)
        echoes = details.echo and details.logprobs and is_first
        if (details.logprobs and token_ids) or echoes:
            own = Reported(token_ids, self._logprobs.pop(index, []), details.num_top, self._places_of(index))
            prompt = [self._prompt(index, details.num_top)] if echoes else []
            choice["logprobs"] = self._as_body(details, [*prompt, own])
        if details.token_ids:
            choice["token_ids"] = LongList(LongPart(token_ids))
        of_prompt: dict[str, LongList] = {}
        if details.token_ids and is_first:
            of_prompt["prompt_token_ids"] = LongList(LongPart(self._prompts[index]))
        if details.prompt_logprobs and is_first:
            of_prompt["prompt_logprobs"] = prompt_logprobs(details, self._prompt(index, details.num_prompt_top))
        return of_prompt

    def _places_of(self, index: int) -> TextPlaces:
        if index not in self._places:
            choice = self._choices[index]
            self._places[index] = TextPlaces(
                self._details.tokenizer,
                self._prompts[index],
                skips_special=choice.skip_special_tokens,
                echo=choice.echo,
            )
        return self._places[index]

    def _prompt(self, index: int, num_top: int) -> Reported:
        number, token_ids = index // self._per_prompt, self._prompts[index]
        # `_of_prompt` has no entry for a prompt of one token, because the first token has no log-probability.
        logprobs = self._of_prompt.get(number, OneLater(()))
        parts = self._parts[number] if self._per_prompt > 1 else None
        places = TextPlaces(self._details.tokenizer, skips_special=self._choices[index].echo_skips_special)
        return Reported(token_ids, logprobs, num_top, places, parts)
