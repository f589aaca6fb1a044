"""Converts streamed tokens to text that never has to be retracted, and ends the text at stop strings."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.tokenizer import REPLACEMENT, Tokenizer

_MAX_OPEN = 3
"""Maximum number of bytes, and therefore tokens, that can wait for the rest of their character, because a UTF-8
character has at most 4 bytes."""
_CONTEXT = 8
"""Number of tokens that a window keeps before the new tokens, and maximum number of new tokens per decoding."""
_MAX_WINDOW = 3 * _CONTEXT
"""Number of tokens above which a window is cut, whatever its text."""
_MAX_LOOKBACK = 4096
"""Maximum number of a prompt's last tokens that are searched for a token with text."""


class _End(NamedTuple):
    """Decoded end of a context."""

    window: list[int]
    """Last tokens of the context."""
    shown: str
    """Text of the window, without an incomplete character at its end."""
    rest: str
    """Replacement characters of the incomplete character."""


class IncrementalDetokenizer:
    """Turns tokens that arrive one by one into text that never has to be retracted.

    Only a window of the latest tokens is decoded, so that the time per token does not depend on the length of the text.
    The window starts some tokens before the new tokens, at the end of a character, because a decoder's output depends
    on preceding tokens. For example, sentencepiece drops a leading space at the start of a text, and decodes a run of
    bytes as text only if the whole run is valid UTF-8.

    The output is the text that the tokens add to the context's text. A character that the context begins belongs to the
    output if the tokens complete it; otherwise its replacement characters belong to the context.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """Starts after the tokens in `context`, whose text is not part of the output."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window, self._shown, self._foreign = self._end_of(context)
        self._num_open = len(self._foreign)
        """Number of replacement characters that are held back at the end of the window's text."""
        self._boundary = 0
        """Index in the window, after its first few tokens, at which all text was final; the next window starts at this
        index."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became final with these tokens.

        The whole text does not depend on how tokens are divided among calls.
        """
        if len(token_ids) > _CONTEXT:
            return "".join(
                self.push(token_ids[start : start + _CONTEXT]) for start in range(0, len(token_ids), _CONTEXT)
            )
        if len(token_ids) > 1:
            text = self._decode([*self._window, *token_ids])
            new = text[len(self._shown) :]
            # If every character is complete, decoding all tokens at once gives the same text as decoding the tokens one
            # at a time.
            if new and REPLACEMENT not in new and text.startswith(self._shown):
                self._window.extend(token_ids)
                return self._show(text, 0)
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Returns the remaining text at the end of the sequence, with incomplete characters as U+FFFD."""
        return self._show(self._decode(self._window), 0)

    def take_foreign(self) -> str:
        """Returns the context's incomplete character, which from now on is part of the output."""
        foreign, self._foreign = self._foreign, ""
        return foreign

    def _push_one(self, token_id: int) -> str:
        before = self._shown + REPLACEMENT * self._num_open
        self._window.append(token_id)
        text = self._decode(self._window)
        if text and text == before and not self._decode((token_id,)):
            # The token has no text, such as a skipped special token.
            self._window.pop()
            return ""
        if not text.startswith(self._shown):
            pairs = zip(text, self._shown, strict=False)
            if next((got for got, shown in pairs if got != shown), "") == REPLACEMENT:
                # A run of bytes has become invalid, which includes characters that were already final.
                self._begin_at(len(self._window) - 1 - self._num_open)
                text = self._decode(self._window)
        return self._show(text, min(_num_open(text), max(0, len(text) - len(self._shown))))

    def _show(self, text: str, num_open: int) -> str:
        """Returns the window's new text, without an incomplete character at its end."""
        end = len(text) - num_open
        new, self._num_open = text[len(self._shown) : end], num_open
        self._shown = text[: max(end, len(self._shown))]
        if new and not num_open:
            self._slide()
        if len(self._window) > _MAX_WINDOW:
            self._cut()
        if new and self._foreign:
            num_same = min(len(self._foreign), len(new) - len(new.lstrip(REPLACEMENT)))
            new, self._foreign = new[num_same:], self._foreign[num_same:] if num_same == len(new) else ""
        return new

    def _slide(self) -> None:
        if self._boundary and len(self._window) > 2 * _CONTEXT:
            self._begin_at(self._boundary)
            self._shown = self._decode(self._window)
        if self._boundary < _CONTEXT:
            self._boundary = len(self._window)

    def _cut(self) -> None:
        """Shortens a window that has produced no text, or whose characters have always been incomplete."""
        # Each replacement character can represent up to three bytes, and therefore up to three tokens.
        self._begin_at(len(self._window) - _MAX_OPEN * _MAX_OPEN)
        text, rest = self._decode(self._window), REPLACEMENT * self._num_open
        if not text.endswith(rest):
            # Decoded alone, the tokens are valid: each token is a byte that is invalid only within its run.
            self._begin_at(len(self._window) - self._num_open)
            text = rest
        self._shown = text[: len(text) - self._num_open]

    def _begin_at(self, place: int) -> None:
        """Makes `place` the start of the window; none of the window's text counts as shown."""
        self._window, self._shown, self._boundary = self._window[place:], "", 0

    def _end_of(self, context: Sequence[int]) -> _End:
        context = self._text_bearing(context)
        for num_open in range(min(_MAX_OPEN, len(context)) + 1):
            for length in range(_CONTEXT, _CONTEXT + _MAX_OPEN + 1):
                window = list(context[-length:])
                closed = self._decode(window[: len(window) - num_open])
                begins = len(window) == len(context) or not closed.startswith(REPLACEMENT)
                if begins and not closed.endswith(REPLACEMENT):
                    if self._decode(window).startswith(closed):
                        return self._split(window)
                    # The last tokens make a preceding run of bytes invalid.
                    return self._split(window[len(window) - num_open :])
        return self._split(list(context[-_CONTEXT - _MAX_OPEN :]))

    def _split(self, window: list[int]) -> _End:
        text = self._decode(window)
        end = len(text) - _num_open(text)
        return _End(window, text[:end], text[end:])

    def _text_bearing(self, context: Sequence[int]) -> Sequence[int]:
        """Drops a context's trailing tokens without text, if there are more such tokens than a window holds."""
        without, most = _CONTEXT, min(len(context), _MAX_LOOKBACK)
        if self._decode(context[-without:]) or not self._decode(context[-most:]):
            return context
        bearing = most
        while bearing - without > 1:
            middle = (without + bearing) // 2
            if self._decode(context[-middle:]):
                bearing = middle
            else:
                without = middle
        return context[: len(context) - without]


def _num_open(text: str) -> int:
    """Number of trailing replacement characters that the next token may complete."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN)


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces (Knuth-Morris-Pratt, one state per stop string).

    The stop string that is completed first ends the text; if a character completes several, the longest does. The
    result therefore does not depend on how the text is divided into pieces.
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
        """The stop string that was completed, or None."""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can no longer be part of a stop string, and whether a stop string was completed.

        The returned text ends before the completed stop string.
        """
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
        """Returns the text held back for a stop string that was not completed."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Returns the length of the longest stop string that this character completes, or 0."""
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
    """Returns the failure table of a pattern.

    Entry i is the length of the longest proper prefix of `pattern[: i + 1]` that is also its suffix.

    Tables are cached, because the choices of a request share their stop strings.
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
    """Text of some pushed tokens."""

    text: str
    num_tokens: int
    """Number of pushed tokens that belong to the sequence; less than all if a stop string ended the sequence earlier.
    """
    stopped: bool
    """Whether a stop string was completed; later tokens do not count."""


class TextStream:
    """The text of one growing sequence, ended by stop strings.

    Args:
        context: the prompt's tokens; stop strings are searched only in the new text.
        stops: strings that end the text.
        skip_special_tokens: whether special tokens are left out of the text.
        include_stop: whether the text includes the stop string or token that ended it.
        min_tokens: number of tokens within which stop strings are ignored.
        echoes: whether the context's text is output first; context and output together are then the text of all tokens.
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
        """Replacement characters of a character that the context begins but does not complete; with `echoes`, they
        belong to this text."""
        self._matcher = StopMatcher(stops)
        self._one_by_one = bool(stops)
        self._include_stop = include_stop
        self._num_free = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """Stop string that ended the text, or None."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> StreamedText:
        """Returns the text that is final after these tokens."""
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
        """Calls `push`, and `flush` once the engine has finished the sequence.

        Returns the text and the finish reason.
        """
        # The token that ended the sequence is not part of the text.
        hides_last = finish is FinishReason.STOP and not self._include_stop
        got = self.push(token_ids[:-1] if hides_last else token_ids)
        if hides_last and not got.stopped:
            got = got._replace(num_tokens=len(token_ids))
        if got.stopped or finish is None:
            return got, FinishReason.STOP if got.stopped else None
        rest = self.flush()
        return got._replace(text=got.text + rest.text), FinishReason.STOP if rest.stopped else finish

    def flush(self) -> StreamedText:
        """Returns the remaining text, once no more tokens follow."""
        text, stopped = self._matcher.push(self._detokenizer.flush())
        return StreamedText(text + (self._stop_text() if stopped else self._matcher.flush()), 0, stopped)

    def _stop_text(self) -> str:
        return self._matcher.matched if self._include_stop else ""
