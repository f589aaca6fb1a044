"""generation_config.json: how a model's own file ends and shapes its texts, and what of that is left to requests.

Fields that end a text, or keep tokens out of texts, hold for every request, as in transformers. How tokens are drawn is
each request's choice. Fields that are read by nobody here are named once, at the start. Loads no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.runtime import config_numbers
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields

if TYPE_CHECKING:
    from wingbeat.runtime.tokenizer import Tokenizer

FILE = "generation_config.json"
HONOURED = frozenset(
    {
        *("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens", "min_length"),
        "sequence_bias",
    }
)
"""Fields that hold for every request."""
BY_REQUEST = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length"),
        *("max_time", "stop_strings", "num_return_sequences"),
    }
)
"""Fields that each request states for itself, or has the API's default of."""
NOT_APPLIED = frozenset(
    {
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "constraints"),
        *("force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size", "guidance_scale"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "dola_layers", "token_healing"),
        *("watermarking_config", "renormalize_logits", "remove_invalid_values"),
    }
)
"""Fields that would change texts, and that nothing here applies."""
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
"""Fields that say how transformers computes, and that no text depends on."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("top_p", "temperature", "guidance_scale"), (1,)),
    "top_k": (0, 50),
    "max_length": (20,),
}
"""Values by which a field changes nothing; False, zero and empty lists are so for all."""


@dataclass(frozen=True)
class TextRules:
    """Rules that a model's own files give every request."""

    eos_token_ids: frozenset[int] = frozenset()
    banned: tuple[int, ...] = ()
    banned_first: tuple[int, ...] = ()
    """Tokens that begin no answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    min_length: int = 0
    """Tokens of prompt and answer together."""
    not_applied: str = ""
    """One line on fields that change nothing here; empty where there are none."""

    def applied(self, request: Request) -> Request:
        """The request with what the model's files add to its own rules."""
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


def read_rules(folder: Path, vocab_size: int, tokenizer: "Tokenizer | None" = None) -> TextRules:
    """Rules for every request from the files of a checkpoint's folder.

    Args:
        vocab_size: of the model; tokens beyond are never generated.
        tokenizer: the folder's, whose own end of text, and what its chat template writes behind an answer, end texts.

    Raises:
        ModelCheckpointError: the file cannot be read, or a field cannot be right; one line that names it.
    """
    file = folder / FILE
    fields = read_fields(file) if file.is_file() else {}
    if (problem := config_numbers.problem(fields)) is not None:
        raise ModelCheckpointError(f"{file}: {problem}")
    read = _Reader(file, fields, vocab_size)
    biased = read.biases("sequence_bias")
    ends = set() if tokenizer is None else set(tokenizer.ends_of_turns())
    eos = frozenset(read.ids("eos_token_id"))
    return TextRules(
        eos_token_ids=frozenset(end for end in ends if end < vocab_size) | eos,
        banned=read.ids("suppress_tokens"),
        banned_first=read.ids("begin_suppress_tokens"),
        # transformers leaves out words that are an end of text alone.
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
    parts = [f"{', '.join(by_request)} (requests say so themselves)"] if by_request else []
    parts += [f"{', '.join(others)} (not served)"] if others else []
    return f"{file} has fields that are not applied: {'; '.join(parts)}" if parts else ""


def _says_something(name: str, value: Any) -> bool:
    return bool(value) and value not in _NEUTRAL.get(name, ())


@dataclass(frozen=True)
class _Reader:
    """Fields of the file, checked."""

    file: Path
    fields: Mapping[str, Any]
    vocab_size: int

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids of the vocabulary; negative ones stand for none in files of Whisper's kind."""
        value = self.fields.get(name)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        self._check(name, listed, "a token id, or a list of them", _is_id)
        return tuple(token_id for token_id in listed if 0 <= token_id < self.vocab_size)

    def words(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Lists of token ids, of which none is outside the vocabulary."""
        listed = self.fields.get(name) or []
        self._check(name, listed, "a list of lists of token ids", _is_word)
        return tuple(tuple(word) for word in listed if all(0 <= one < self.vocab_size for one in word))

    def biases(self, name: str) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Lists of token ids, each with what is added to the logit of its last one."""
        listed = self.fields.get(name) or []
        self._check(name, listed, "a list of pairs: token ids, and a number", _is_biased)
        return tuple(
            (tuple(word), float(bias)) for word, bias in listed if all(0 <= one < self.vocab_size for one in word)
        )

    def count(self, name: str) -> int:
        """A number of tokens."""
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
