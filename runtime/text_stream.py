"""The text of tokens that arrive one by one, which never has to be taken back, and where a stop string ends it."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.tokenizer import REPLACEMENT, Tokenizer

_MAX_OPEN = 3
"""Bytes, and so tokens, that can still wait for the rest of their character: UTF-8 takes at most 4."""
_CONTEXT = 8
"""Tokens a window keeps before the new ones, and most new ones at a time."""
_MAX_WINDOW = 3 * _CONTEXT
"""Tokens after which a window is cut, whatever they spell."""
_MAX_LOOKBACK = 4096
"""Tokens of a prompt that are looked through for the last one that is text."""


class _End(NamedTuple):
    """Where a context ends."""

    window: list[int]
    """Its last tokens."""
    shown: str
    """Their text but for what may be the beginning of a character."""
    rest: str
    """That beginning: replacement characters."""


class IncrementalDetokenizer:
    """Turns tokens that arrive one by one into text that never has to be taken back.

    Only a window of the latest tokens is decoded, so a token costs the same at any length. The window starts where a
    character ended, some tokens back: a decoder's output depends on what stands before (sentencepiece drops a leading
    space at the start of a text, and spells a run of bytes as text only when the whole run is valid UTF-8).

    The output is what the tokens add to their context's text. A character that the context begins is part of it where
    the tokens complete it; where they do not, what stands for its beginning is the context's.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        """`context` holds the tokens before the first pushed one; their text is not part of the output."""
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._window, self._shown, self._foreign = self._end_of(context)
        self._num_open = len(self._foreign)
        """Replacement characters that are held back at the end of the window's text."""
        self._boundary = 0
        """A place in the window, past its first few tokens, where all text was final: the next window starts there."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these tokens; all of it is the same however they are divided among calls."""
        if len(token_ids) > _CONTEXT:
            return "".join(
                self.push(token_ids[start : start + _CONTEXT]) for start in range(0, len(token_ids), _CONTEXT)
            )
        if len(token_ids) > 1:
            text = self._decode([*self._window, *token_ids])
            new = text[len(self._shown) :]
            # Where every character is whole, the tokens between do not matter.
            if new and REPLACEMENT not in new and text.startswith(self._shown):
                self._window.extend(token_ids)
                return self._show(text, 0)
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The rest at the end of the sequence, unfinished characters as U+FFFD."""
        return self._show(self._decode(self._window), 0)

    def take_foreign(self) -> str:
        """What the context's text ends with where no token completes it; from now on it is part of the output."""
        foreign, self._foreign = self._foreign, ""
        return foreign

    def _push_one(self, token_id: int) -> str:
        before = self._shown + REPLACEMENT * self._num_open
        self._window.append(token_id)
        text = self._decode(self._window)
        if text and text == before and not self._decode((token_id,)):
            # It is left out of texts.
            self._window.pop()
            return ""
        if not text.startswith(self._shown):
            pairs = zip(text, self._shown, strict=False)
            if next((got for got, shown in pairs if got != shown), "") == REPLACEMENT:
                # A run of bytes has become invalid, and with it characters that were final.
                self._begin_at(len(self._window) - 1 - self._num_open)
                text = self._decode(self._window)
        return self._show(text, min(_num_open(text), max(0, len(text) - len(self._shown))))

    def _show(self, text: str, num_open: int) -> str:
        """What is new of the window's text, but for what may be the beginning of a character."""
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
        """Shorten a window that brings no text, or in which a character has always been open."""
        # Each replacement character stands for up to three bytes, so for up to three tokens.
        self._begin_at(len(self._window) - _MAX_OPEN * _MAX_OPEN)
        text, rest = self._decode(self._window), REPLACEMENT * self._num_open
        if not text.endswith(rest):
            # By themselves they are text: each token is a byte, which is invalid in its run alone.
            self._begin_at(len(self._window) - self._num_open)
            text = rest
        self._shown = text[: len(text) - self._num_open]

    def _begin_at(self, place: int) -> None:
        """Make it the window's begin, where nothing is shown yet."""
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
                    # The rest makes a run of bytes invalid, which ended before it.
                    return self._split(window[len(window) - num_open :])
        return self._split(list(context[-_CONTEXT - _MAX_OPEN :]))

    def _split(self, window: list[int]) -> _End:
        text = self._decode(window)
        end = len(text) - _num_open(text)
        return _End(window, text[:end], text[end:])

    def _text_bearing(self, context: Sequence[int]) -> Sequence[int]:
        """The context up to its last token that is text, if there are many behind it that are left out."""
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
    """Replacement characters at a text's end that the next token may make a character of."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN)


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
