"""Converts text to token ids and back: encoding, the chat template, decoding."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from wingbeat.runtime.folder_kinds import VOCABULARIES
from wingbeat.runtime.hugging_face import load_files, read_config
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.token_length import longest_token
from wingbeat.runtime.tokenizer_file import no_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_MARK = "an answer"
LONG_TEXT_CHARS = 4096
"""Number of characters above which a text is tokenized without the interpreter lock, so that other threads run
meanwhile."""

REPLACEMENT = "�"
"""Character that decoders write for invalid bytes, such as an incomplete character."""
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\u2581"
"""Character for a space in sentencepiece vocabularies."""
_KEPT_TOKENS = 2**15
"""Number of tokens whose texts are cached, because log-probability reports repeat the same tokens."""

_MAX_REASON = 200
"""Maximum number of characters to quote of transformers' error message about an unreadable tokenizer."""


class TextTooLong(Exception):
    """A text has more tokens than allowed."""

    def __init__(self, num_tokens: int | None = None) -> None:
        """`num_tokens` is None if the text was refused without tokenizing."""
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class Tokenizer:
    """A Hugging Face tokenizer with only the methods that serving needs; safe to share between threads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.hugging_face = tokenizer
        if tokenizer.is_fast:
            # Truncation and padding, which a checkpoint may enable, are disabled here, because disabling them in each
            # call would change state that threads share.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        self._longest_token = longest_token(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        self.token_text = lru_cache(_KEPT_TOKENS)(self._token_text)
        """Returns the text of a single token, including special tokens."""

    @property
    def chat_template(self) -> str | None:
        """Chat template of the model; the template for tools if the model has several templates.

        The value is None if the model has no template.
        """
        template = self.hugging_face.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or None

    @classmethod
    def load(cls, directory: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Reads the tokenizer of a checkpoint folder.

        Args:
            chat_template: template text that replaces the folder's template.

        Raises:
            ValueError: the folder holds no tokenizer that transformers can read.
        """
        from transformers import AutoTokenizer  # the import takes seconds, for which command-line help should not wait

        try:
            read = load_files(AutoTokenizer, str(directory), **_config_of(Path(directory)))
            read.chat_template = chat_template or read.chat_template or _processors_template(Path(directory))
            return cls(read)
        except Exception as error:
            if not any((Path(directory) / name).is_file() for name in VOCABULARIES):
                raise ValueError(no_tokenizer(Path(directory))) from error
            # For damaged files, transformers raises nearly any exception, and tokenizers raises a bare Exception.
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            reason = " ".join(str(error).split())[:_MAX_REASON]
            raise ValueError(f"no tokenizer in {directory}: {kind}{reason}") from error

    @classmethod
    def find(cls, directory: str | Path) -> "Tokenizer | None":
        """Returns the tokenizer of a checkpoint folder; None if the folder has no tokenizer file.

        Raises like `load`.
        """
        has_files = any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES)
        return cls.load(directory) if has_files else None

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Returns token ids of a text, by default with the special tokens that the model expects around a prompt.

        Raises:
            TextTooLong: there are more than `max_tokens` tokens. A text that is certainly too long is not tokenized.
        """
        longest = self._longest_token
        if max_tokens is not None and longest is not None and len(text) > max_tokens * longest:
            raise TextTooLong
        if not self.hugging_face.is_fast:
            token_ids = self.hugging_face.encode(text, add_special_tokens=add_special_tokens)
            return _at_most(max_tokens, token_ids)
        backend = self.hugging_face.backend_tokenizer
        if len(text) <= LONG_TEXT_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Only the batch calls release the interpreter lock.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return _at_most(max_tokens, encoding).ids

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Returns the text of a conversation, including its special tokens.

        Args:
            messages: as transformers' chat templates read them.
            variables: further template variables, such as `tools`, and transformers' `add_generation_prompt` or
                `continue_final_message`. By default `add_generation_prompt` is true, so that the text ends where the
                assistant's answer begins.
            chat_template: template text sent by a caller, which replaces the model's template and is rendered within
                limits of time and memory.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages or exceeds the limits.
        """
        template = chat_template or self.hugging_face.chat_template
        if not template:
            raise ValueError("the model has no chat template; use a plain completion")
        if "developer" not in str(template):
            # `developer` is OpenAI's newer name for the system role, and is replaced because most templates would drop
            # or refuse the message.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {"add_generation_prompt": True, **(variables or {})}
        if chat_template is not None:
            return first_result(
                "render_apart", chat_template, messages, variables, self.hugging_face.special_tokens_map
            )
        try:
            return self.hugging_face.apply_chat_template(list(messages), tokenize=False, **variables)
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # Templates compute with values from callers, so any exception counts as a refusal of the input.
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. Ids without text are left out; by default, special tokens are left out too."""
        if len(token_ids) > LONG_TEXT_CHARS and self.hugging_face.is_fast:
            backend = self.hugging_face.backend_tokenizer
            # Only the batch calls release the interpreter lock.
            return backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self.hugging_face.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's text in UTF-8; for a token that is a part of a character, returns that part's bytes."""
        text = self.token_text(token_id)
        if REPLACEMENT in text:
            (piece,) = self.pieces((token_id,))
            found, letters = BYTE_PIECE.fullmatch(piece), byte_of_letter()
            if found:
                return bytes.fromhex(found[1])
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
        return text.encode("utf-8", "replace")

    def _token_text(self, token_id: int) -> str:
        return self.decode((token_id,), False)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each token, as text."""
        return self.hugging_face.convert_ids_to_tokens(list(token_ids))

    def ends_of_turns(self, vocab_size: int) -> frozenset[int]:
        """Returns the eos token, and the special token that the chat template writes after an answer, if they belong to
        the model's vocabulary.
        """
        ends: set[Any] = {self.hugging_face.eos_token_id} - {None}
        try:
            turns = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
            written = self.render_chat(turns, {"add_generation_prompt": False}) if self.chat_template else ""
        except ValueError:  # the template refuses this conversation
            written = ""
        behind = written.rpartition(_MARK)[2].lstrip()
        special = {token.content: token_id for token_id, token in self.hugging_face.added_tokens_decoder.items()}
        first = max((text for text in special if text and behind.startswith(text)), key=len, default=None)
        ends |= set() if first is None else {special[first]}
        return frozenset(end for end in ends if end < vocab_size)


def _config_of(directory: Path) -> dict[str, Any]:
    """Returns the option that passes the folder's normalised config to transformers.

    Without the option, transformers would read the raw file. Empty if the folder has no config.
    """
    try:
        return {"config": read_config(directory)}
    except ModelCheckpointError:
        return {}


def _processors_template(directory: Path) -> str | None:
    """Returns the chat template that a multimodal model stores only in its processor's file."""
    file = directory / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.is_file() else None


@lru_cache(1)
def byte_of_letter() -> dict[str, int]:
    """Maps the letters of byte-level vocabularies to bytes.

    Printable Latin-1 letters stand for themselves; letters from code point 256 on stand for the other bytes.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _at_most(max_tokens: int | None, tokens):
    """Returns `tokens` (a sequence or an encoding); raises TextTooLong if there are more than `max_tokens`."""
    if max_tokens is not None and len(tokens) > max_tokens:
        raise TextTooLong(len(tokens))
    return tokens
