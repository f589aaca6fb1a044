"""The text of one growing sequence, and where a stop string ends it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from wingbeat.runtime.detokenizer import IncrementalDetokenizer
from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces (Knuth-Morris-Pratt, one state per stop string).

    The first one to be completed wins, the longest of several completed by the same character, so the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was completed."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can no longer belong to a stop string, and whether one was completed (the text ends before it)."""
        if not self._stops:
            return text, False
        pending = self._held + text
        for position in range(len(self._held), len(pending)):
            length = self._advance(pending[position])
            if length:
                self._held = ""
                self.matched = pending[position + 1 - length : position + 1]
                return pending[: position + 1 - length], True
        num_held = max(self._states)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held], False

    def flush(self) -> str:
        """The text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that this character completes, 0 for none."""
        completed = 0
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            state += stop[state] == character
            if state == len(stop):
                completed = max(completed, state)
                state = failure[state - 1]
            self._states[index] = state
        return completed


@lru_cache(maxsize=256)
def _failure_table(pattern: str) -> list[int]:
    """[i] is the length of the longest proper prefix of `pattern[: i + 1]` that is also its suffix.

    Kept for the choices of a request, which share their stop strings.
    """
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table


class StreamedText(NamedTuple):
    """What some tokens brought."""

    text: str
    num_tokens: int
    """How many of the tokens belong to the sequence: fewer than were pushed when a stop string ended it earlier."""
    stopped: bool
    """A stop string was completed; nothing after it counts."""


class TextStream:
    """The text of one growing sequence, ended by stop strings.

    Args:
        context: the prompt's tokens; stop strings are looked for in the new text only.
        stops: strings that end the text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: the text holds what ended it, a stop string or a token.
        min_tokens: as many tokens are text, whatever they spell.
        echoes: the context's text is shown before this one, and both are to be the text of all tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        stops: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        echoes: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self.context_rest = self._detokenizer.take_foreign() if echoes else ""
        """What an echo ends with that is part of this text: a character that the context has only begun."""
        self._matcher = StopMatcher(stops)
        self._one_by_one = bool(stops)
        self._include_stop = include_stop
        self._num_free = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> StreamedText:
        """Text that is final after these tokens."""
        if not self._one_by_one:
            return StreamedText(self._detokenizer.push(token_ids) if token_ids else "", len(token_ids), False)
        pieces = []
        for index, token_id in enumerate(token_ids):
            text, stopped = self._detokenizer.push((token_id,)), False
            self._num_free -= 1
            if self._num_free < 0:
                text, stopped = self._matcher.push(text)
            pieces.append(text)
            if stopped:
                return StreamedText("".join(pieces) + self._stop_text(), index + 1, True)
        return StreamedText("".join(pieces), len(token_ids), False)

    def take(self, token_ids: Sequence[int], finish: FinishReason | None) -> tuple[StreamedText, FinishReason | None]:
        """`push`, and the rest where the engine has finished; with the reason why the text ends, stop strings known."""
        # The token that ended the sequence is no text.
        hides_last = finish is FinishReason.STOP and not self._include_stop
        got = self.push(token_ids[:-1] if hides_last else token_ids)
        if hides_last and not got.stopped:
            got = got._replace(num_tokens=len(token_ids))
        if got.stopped or finish is None:
            return got, FinishReason.STOP if got.stopped else None
        rest = self.flush()
        return got._replace(text=got.text + rest.text), FinishReason.STOP if rest.stopped else finish

    def flush(self) -> StreamedText:
        """The rest, once no more tokens come."""
        text, stopped = self._matcher.push(self._detokenizer.flush())
        return StreamedText(text + (self._stop_text() if stopped else self._matcher.flush()), 0, stopped)

    def _stop_text(self) -> str:
        return self._matcher.matched if self._include_stop else ""
