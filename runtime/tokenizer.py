"""Text to token ids and back: encoding, the chat template, text that grows token by token, and stop strings."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.token_length import longest_token

REPLACEMENT = "�"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

LONG_TEXT_CHARS = 4096
"""Texts above this are tokenized without the interpreter lock, so that another thread can go on meanwhile."""

_MAX_REASON = 200
"""Characters of what transformers says about a tokenizer that it cannot read."""

_MAX_UNFINISHED = 3
"""Bytes, and so tokens, that can still wait for the rest of their character: UTF-8 takes at most 4."""
_CONTEXT = 8
"""Tokens a window keeps before the new ones."""
_MAX_WINDOW = 3 * _CONTEXT
"""Tokens after which text that is still unfinished counts as invalid."""


class TextTooLong(Exception):
    """A text has more tokens than it may have."""

    def __init__(self, num_tokens: int | None = None) -> None:
        """`num_tokens` is None where the text was refused unread."""
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what serving needs; safe to share between threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        if tokenizer.is_fast:
            # A checkpoint may bring both, and switching them off per call would mutate shared state.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        self._longest_token = longest_token(tokenizer.backend_tokenizer) if tokenizer.is_fast else None

    @property
    def hugging_face(self) -> PreTrainedTokenizerBase:
        """The tokenizer itself, for libraries that read its vocabulary."""
        return self._tokenizer

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder.

        Raises:
            ValueError: the folder holds none that transformers can read.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False))
        except Exception as error:
            # A damaged file makes transformers raise nearly anything, and tokenizers a bare Exception.
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            reason = " ".join(str(error).split())[:_MAX_REASON]
            raise ValueError(f"no tokenizer in {directory}: {kind}{reason}") from error

    @classmethod
    def find(cls, directory: str | Path) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder, or None where the folder has no file of one; raises as `load`."""
        has_files = any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES)
        return cls.load(directory) if has_files else None

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, by default with the special tokens the model expects around a prompt.

        Raises:
            TextTooLong: there are more than `max_tokens`; a text that must be longer is not tokenized to find out.
        """
        longest = self._longest_token
        if max_tokens is not None and longest is not None and len(text) > max_tokens * longest:
            raise TextTooLong
        if not self._tokenizer.is_fast:
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return _at_most(max_tokens, token_ids)
        backend = self._tokenizer.backend_tokenizer
        if len(text) <= LONG_TEXT_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Only the calls for batches release the interpreter lock.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return _at_most(max_tokens, encoding).ids

    def render_chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The text of a conversation; it has its special tokens already.

        Args:
            messages: as transformers' chat templates read them.
            variables: what else the template may read, such as `tools`; and transformers' `add_generation_prompt`,
                true by default so that the text ends where the assistant's answer begins, or `continue_final_message`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        template = self._tokenizer.chat_template
        if not template:
            raise ValueError("the model has no chat template; use a plain completion")
        if "developer" not in str(template):
            # OpenAI's newer name for the system role; templates that do not know it would drop or refuse the message.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {"add_generation_prompt": True, **(variables or {})}
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **variables)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            # A template computes with what callers send: what it cannot compute with, it refuses.
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def encode_chat(self, messages: Sequence[dict[str, str]], max_tokens: int | None = None) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            TextTooLong: there are more than `max_tokens`, as for `encode`.
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False, max_tokens=max_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; ids without a piece of text are left out, and by default special tokens."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def describe(self) -> dict[str, Any]:
        """What `tokenizer_config.json` says of special tokens and the chat template."""
        tokenizer = self._tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "added_tokens_decoder": {
                str(token_id): {"content": token.content, "special": token.special}
                for token_id, token in tokenizer.added_tokens_decoder.items()
            },
            "chat_template": tokenizer.chat_template,
        }


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


def _at_most(max_tokens: int | None, tokens):
    """The tokens, a sequence or an encoding; raises TextTooLong where there are too many."""
    if max_tokens is not None and len(tokens) > max_tokens:
        raise TextTooLong(len(tokens))
    return tokens


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
