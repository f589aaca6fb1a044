"""Reads generation_config.json: rules that apply to every request, and fields that are not applied.

Fields that ban tokens or set a minimum length apply to every request, as in transformers. Sampling fields are left to
each request. All other fields that would affect the generated text are ignored; their names are reported at startup.
This module imports no torch.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wingbeat.runtime.parts import first_result
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields

logger = logging.getLogger(__name__)
FILE = "generation_config.json"
HONOURED = frozenset(
    {
        *("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens", "min_length"),
        "sequence_bias",
    }
)
"""Fields that apply to every request."""
BY_REQUEST = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length"),
        *("max_time", "stop_strings", "num_return_sequences"),
    }
)
"""Fields that each request sets itself; otherwise the API's defaults apply."""
NOT_APPLIED = frozenset(
    {
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "constraints"),
        *("force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size", "guidance_scale"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "dola_layers", "token_healing"),
        *("watermarking_config", "renormalize_logits", "remove_invalid_values"),
    }
)
"""Fields that would affect the generated text, but are not implemented and therefore ignored."""
WITHOUT_EFFECT = frozenset(
    {
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "return_legacy_cache"),
        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    }
)
"""Fields about how transformers computes, which do not affect the generated text."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("top_p", "temperature", "guidance_scale"), (1,)),
    "top_k": (0, 50),
    "max_length": (20,),
}
"""Values with which a field has no effect. False, zero and empty lists have no effect in any field."""


@dataclass(frozen=True)
class TextRules:
    """Rules from a model's own files that apply to every request."""

    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()
    """Token ids that must not begin an answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    min_length: int = 0
    """Minimum number of tokens of prompt and answer together."""
    not_applied: str = ""
    """Line of text that lists the fields that are not applied; empty if all fields are applied."""

    def applied(self, request: Request) -> Request:
        """Returns the request with the rules of the model's files added to the request's own rules."""
        params = request.params
        if params.report is not None:
            return request
        least = max(params.min_tokens, self.min_new_tokens, self.min_length - len(request.prompt_token_ids))
        words = (*self.bad_words, *((token_id,) for token_id in self.banned))
        added = {
            "min_tokens": min(least, max(params.min_tokens, params.max_tokens)),
            "bad_words": (*params.bad_words, *words),
            "banned_first": (*params.banned_first, *self.banned_first),
            "logit_bias": (*self.logit_bias, *params.logit_bias),
        }
        changed = {name: value for name, value in added.items() if value != getattr(params, name)}
        return replace(request, params=replace(params, **changed)) if changed else request


def request_rules(folder: Path, vocab_size: int) -> Callable[[Request], Request]:
    """Returns `TextRules.applied` of a checkpoint's folder, and logs the fields that are not applied.

    Raises the errors of `read_rules`.
    """
    rules = read_rules(folder, vocab_size)
    if rules.not_applied:
        logger.warning("%s", rules.not_applied)
    return rules.applied


def read_rules(folder: Path, vocab_size: int) -> TextRules:
    """Reads the rules for every request from a checkpoint's folder.

    Args:
        vocab_size: size of the model's vocabulary; token ids beyond this size are never generated.

    Raises:
        ModelCheckpointError: the file cannot be read, or a field has an impossible value; the message is one line that
            names the file or field.
    """
    file = folder / FILE
    fields = read_fields(file) if file.is_file() else {}
    if (problem := first_result("config_problem", fields)) is not None:
        raise ModelCheckpointError(f"{file}: {problem}")
    read = _Reader(file, fields, vocab_size)
    biased = read.biases("sequence_bias")
    eos = read.ids("eos_token_id")
    return TextRules(
        banned=read.ids("suppress_tokens"),
        banned_first=read.ids("begin_suppress_tokens"),
        # Bad words that consist of a single end-of-text token are dropped, as transformers does.
        bad_words=tuple(word for word in read.words("bad_words_ids") if not (len(word) == 1 and word[0] in eos)),
        logit_bias=tuple((word[0], bias) for word, bias in biased if len(word) == 1),
        min_new_tokens=read.count("min_new_tokens"),
        min_length=read.count("min_length"),
        not_applied=_not_applied(file, fields, [word for word, _ in biased if len(word) > 1]),
    )


def _not_applied(file: Path, fields: Mapping[str, Any], long_words: list[tuple[int, ...]]) -> str:
    set_here = {name: value for name, value in fields.items() if _says_something(name, value)}
    by_request = [f"{name} {value}" for name, value in set_here.items() if name in BY_REQUEST]
    others = [name for name in set_here if name not in HONOURED | BY_REQUEST | WITHOUT_EFFECT]
    others += ["sequence_bias of several tokens"] if long_words else []
    parts = [f"{', '.join(by_request)} (each request sets its own)"] if by_request else []
    parts += [f"{', '.join(others)} (not supported)"] if others else []
    return f"{file} has fields that are not applied: {'; '.join(parts)}" if parts else ""


def _says_something(name: str, value: Any) -> bool:
    return bool(value) and value not in _NEUTRAL.get(name, ())


@dataclass(frozen=True)
class _Reader:
    """Reads fields of the file and checks their values."""

    file: Path
    fields: Mapping[str, Any]
    vocab_size: int

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns token ids within the vocabulary.

        Negative ids are dropped, because in files like Whisper's a negative id means that there is no token.
        """
        value = self.fields.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        self._check(name, listed, "a token id, or a list of them", _is_id)
        return tuple(token_id for token_id in listed if 0 <= token_id < self.vocab_size)

    def words(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Returns lists of token ids; lists with an id outside the vocabulary are left out."""
        listed = self.fields.get(name) or []
        self._check(name, listed, "a list of lists of token ids", _is_word)
        return tuple(tuple(word) for word in listed if all(0 <= one < self.vocab_size for one in word))

    def biases(self, name: str) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Returns lists of token ids, each with the bias added to the logit of its last token."""
        listed = self.fields.get(name) or []
        self._check(name, listed, "a list of pairs: token ids, and a number", _is_biased)
        return tuple(
            (tuple(word), float(bias)) for word, bias in listed if all(0 <= one < self.vocab_size for one in word)
        )

    def count(self, name: str) -> int:
        """Returns the value of a field that holds a number of tokens."""
        value = self.fields.get(name) or 0
        self._check(name, [value], "a whole number of at least 0", lambda one: _is_id(one) and one >= 0)
        return int(value)

    def _check(self, name: str, listed: Any, words: str, is_right: Callable[[Any], bool]) -> None:
        if not isinstance(listed, Iterable) or isinstance(listed, str | Mapping) or not all(map(is_right, listed)):
            shown = str(self.fields.get(name))
            raise ModelCheckpointError(f"{self.file}: {name} is {shown[:80]}, it must be {words}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_biased(value: Any) -> bool:
    number = isinstance(value, list) and len(value) == 2 and isinstance(value[1], int | float)
    return number and _is_word(value[0])
