"""The text of tokens that arrive one by one: text that never has to be taken back, and where a stop string ends it."""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.tokenizer import Tokenizer

REPLACEMENT = "�"

_MAX_UNFINISHED = 3
"""Bytes, and so tokens, that can still wait for the rest of their character: UTF-8 takes at most 4."""
_CONTEXT = 8
"""Tokens a window keeps before the new ones."""
_MAX_WINDOW = 3 * _CONTEXT
"""Tokens after which text that is still unfinished counts as invalid."""


class IncrementalDetokenizer:
    """Turns tokens that arrive one by one into text that never has to be taken back.

    Only a window of the latest tokens is decoded, so a token costs the same at any length. The window starts where a
    character ended, some tokens back: a decoder's output depends on what stands before (sentencepiece drops a leading
    space at the start of a text, and spells a run of bytes as text only when the whole run is valid UTF-8).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """`context` holds the tokens before the first pushed one; their text is not part of the output."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window, self._num_sent = self._last_characters(context)
        self._boundary = 0
        """A place in the window, past its first few tokens, where all text was final: the next window starts there."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became final with these tokens."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._push_unfinished(text)
        new = text[self._num_sent :]
        self._num_sent = max(self._num_sent, len(text))
        if new:
            self._slide()
        return new

    def flush(self) -> str:
        """The rest at the end of the sequence, unfinished characters as U+FFFD."""
        text = self._decode(self._window)
        new, self._num_sent = text[self._num_sent :], max(len(text), self._num_sent)
        return new

    def _push_unfinished(self, text: str) -> str:
        if len(self._window) <= _MAX_WINDOW:
            return ""
        # Too long for one character: bytes that are no text. All but the last few are final.
        num_open = min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_UNFINISHED)
        new = text[self._num_sent : len(text) - num_open]
        # Each of those replacement characters stands for up to three bytes, so for up to three tokens.
        self._window = self._window[-_MAX_UNFINISHED * _MAX_UNFINISHED :]
        self._num_sent = len(self._decode(self._window)) - num_open
        self._boundary = 0
        return new

    def _slide(self) -> None:
        if self._boundary and len(self._window) > 2 * _CONTEXT:
            self._window = self._window[self._boundary :]
            self._num_sent = len(self._decode(self._window))
            self._boundary = 0
        if self._boundary < _CONTEXT:
            self._boundary = len(self._window)

    def _last_characters(self, context: Sequence[int]) -> tuple[list[int], int]:
        """The last tokens of the context from where a character begins, and the length of their finished text."""
        for num_open in range(_MAX_UNFINISHED + 1):
            for length in range(_CONTEXT, _CONTEXT + _MAX_UNFINISHED + 1):
                tail = list(context[-length:])
                text = self._decode(tail[: len(tail) - num_open])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return tail, len(text)
        tail = list(context[-_CONTEXT:])
        return tail, len(self._decode(tail))


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
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
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
