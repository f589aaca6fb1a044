"""Translates vLLM's `speculative_config` to settings of the drafter, its draft depth and a forced acceptance."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from wingbeat.deployments.vllm_words.foreign_rows import Given, Row, Settings, becomes, left_out, refused, translate
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.drafters.choice import KINDS

PLACE = "speculative_config"
_BY_FOLDER = "{drafter} is the folder or hub name in `model`; its files decide the kind"
_OF_MODEL = "{drafter} is `mtp`, the modules in the model's own checkpoint; every method `..._mtp` is read as `mtp`"
METHODS = {
    **dict.fromkeys(("eagle", "eagle3", "dflash", "dspark", "jetspec", "p_eagle", "draft_model"), _BY_FOLDER),
    "mtp": _OF_MODEL,
    **dict.fromkeys(("ngram", "ngram_gpu"), "{drafter} is `ngram`"),
    "suffix": "{drafter} is `suffix`",
}
"""Settings that replace each method of speculation; the keys are vLLM's names of the methods."""
_ALLOWED = "there is no drafter of this method: use eagle3, eagle, mtp, draft_model, dflash, suffix or ngram"
_BY_RULE = "measured costs and tracked acceptance decide each round's draft depth"


def flat(values: Given) -> dict[str, Any]:
    """Returns the options with `speculative_config`, an object or JSON, replaced by its fields `speculative_config.x`.

    Raises:
        ValueError: `speculative_config` is not an object.
    """
    found, said = dict(values), values.get(PLACE)
    if said is None:
        return found
    del found[PLACE]
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError as error:
            raise ValueError(f"{PLACE} is not valid JSON: {error}") from None
    if not isinstance(said, Mapping):
        raise ValueError(f'{PLACE} is {said!r}: must be an object, such as {{"method": "eagle3", "model": "DIR"}}')
    return found | {f"{PLACE}.{name}": value for name, value in said.items()}


def _method(given: Given) -> str:
    """Returns the method as spelled in `METHODS`; empty if none is given."""
    text = str(given.get(f"{PLACE}.method") or "").lower().replace("-", "_")
    return "mtp" if text.endswith("_mtp") else text


def _drafter(value: Any, given: Given) -> Settings:
    method = _method(given)
    if method not in METHODS:
        raise ValueError(_ALLOWED)
    if METHODS[method] != _BY_FOLDER:
        return {"drafter": method.removesuffix("_gpu")}
    if given.get(f"{PLACE}.model") is None:
        raise ValueError("this method needs `model`, the drafter's folder or hub name")
    return {}


def _model(model: Any, given: Given) -> Settings:
    method = _method(given)
    if method in ("ngram", "ngram_gpu", "suffix") or (method == "mtp" and model == given.get("model")):
        return {}
    if method == "mtp":
        raise ValueError("MTP modules are read from the model's own checkpoint: leave `model` out")
    if str(model).strip("[]") == "ngram":  # as in vLLM, ngram may be given as the model if no method is given
        return {"drafter": "ngram"}
    revision = given.get(f"{PLACE}.revision")
    return {"drafter": f"{model}@{revision}" if revision else str(model)}


def _tokens(number: Any, given: Given) -> Settings:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            "must be a whole number from 1 on; to decode without drafts, give {drafter} none and no speculative_config"
        )
    # if a tree is given, the number counts the nodes of the tree
    if given.get(f"{PLACE}.speculative_token_tree") is not None:
        return {}
    of_model = not _method(given) and given.get(f"{PLACE}.model") is None
    return {"draft_steps": number} | ({"drafter": "mtp"} if of_model else {})


def _tree(value: Any, given: Given) -> Settings:
    """Reads the paths of a tree: vLLM's literal of tuples, or a list of lists."""
    try:
        paths = ast.literal_eval(value) if isinstance(value, str) else value
        return {"draft_top_k": [list(path) for path in paths]}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("must be a list of paths, such as [(0,), (0, 0), (1,)]") from None


def _beside(value: Any, given: Given) -> Settings:
    """Reads TensorRT-LLM's `sa_config`, which is a bool or an object; true and any object turn suffix drafts on."""
    if not isinstance(value, Mapping | bool):
        raise ValueError("must be an object, such as {}, or true")
    return {"suffix_beside": value is not False}


def _method_of_acceptance(method: Any, given: Given) -> Settings:
    if method == "synthetic" and not any(given.get(f"{PLACE}.{one}") is not None for one in _SYNTHETIC):
        raise ValueError(f"synthetic needs {' or '.join(_SYNTHETIC)}")
    if method not in ("standard", "strict", "probabilistic", "block", "synthetic"):
        raise ValueError("must be standard, block or synthetic")
    return {}


def _length(length: Any, given: Given) -> Settings:
    """Converts the mean number of tokens per round to an acceptance rate for each level. As in vLLM, levels below the
    mean are always accepted.
    """
    _only_synthetic(given)
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise ValueError("must be a number from 1 on: mean tokens per round, the bonus token included")
    drafted = given.get(f"{PLACE}.num_speculative_tokens")
    if isinstance(drafted, int) and length > drafted + 1:
        raise ValueError(f"must be at most {drafted + 1}, num_speculative_tokens and the bonus token")
    return _forced(ForcedAcceptance.length(length).rates, given)


def _rates(rates: Any, given: Given) -> Settings:
    """Converts vLLM's acceptance rates, one for each level of the draft, to Wingbeat's.

    vLLM's rate is the share of all rounds that accept the level; Wingbeat's is the share of the rounds that accepted
    the level before.
    """
    _only_synthetic(given)
    fits = isinstance(rates, list) and rates and all(isinstance(rate, int | float) for rate in rates)
    if not fits or not all(1 >= one >= next_one >= 0 for one, next_one in zip([1, *rates], rates, strict=False)):
        raise ValueError("must be a list of rates from 0 to 1, none above the one before it")
    drafted = given.get(f"{PLACE}.num_speculative_tokens")
    if isinstance(drafted, int) and len(rates) != drafted:
        raise ValueError(f"must be {drafted} rates, one for each of num_speculative_tokens")
    given_above = [rate / above if above else 0.0 for above, rate in zip([1, *rates], rates, strict=False)]
    return _forced((*given_above, 0.0), given)


def _forced(rates: tuple[float, ...], given: Given) -> dict[str, Any]:
    """Returns settings that force these rates.

    Unless a tree is given, drafts are chains of fixed length, as in vLLM.
    """
    chains = {} if given.get(f"{PLACE}.speculative_token_tree") is not None else {"draft_top_k": 1}
    return {"forced_acceptance": ",".join(f"{rate:.12g}" for rate in rates), "adaptive": False, **chains}


def _only_synthetic(given: Given) -> None:
    if given.get(f"{PLACE}.rejection_sample_method") != "synthetic":
        raise ValueError("needs rejection_sample_method synthetic")
    if all(given.get(f"{PLACE}.{one}") is not None for one in _SYNTHETIC):
        raise ValueError("synthetic_acceptance_length and synthetic_acceptance_rates are both given: leave one out")


def _of_kind(kind: str, setting: str) -> Row:
    """Returns the row of a setting that belongs to one kind of drafter; for other kinds, the setting is ignored."""

    def read(value: Any, given: Given) -> Settings:
        method = _method(given).removesuffix("_gpu") or str(given.get(f"{PLACE}.model")).strip("[]")
        return {setting: value} if method == kind else {}

    return becomes(f"{{{setting}}} if {{drafter}} is `{kind}`; else ignored", read)


_SYNTHETIC = ("synthetic_acceptance_length", "synthetic_acceptance_rates")
_AS_VERIFIER = left_out("a drafter runs like its verifier")
_FIELDS = {
    "method": becomes("{drafter}, by the table of methods", _drafter),
    "model": becomes("{drafter}: a folder or hub name", _model),
    "num_speculative_tokens": becomes(
        "{draft_steps}: levels of a draft tree, or of a chain if {draft_top_k} is 1", _tokens
    ),
    "revision": becomes("{drafter} as `model@revision`", lambda value, given: {}),
    "code_revision": refused("code of a checkpoint is never run"),
    "draft_tensor_parallel_size": left_out(
        "a drafter runs in one process",
        1,
        otherwise="a drafter runs in one process, {tensor_parallel_size} divides only the verifier: leave it out",
    ),
    "quantization": refused("the drafter's config.json decides; {drafter_weights} fp8 rounds a head's weights"),
    "max_model_len": left_out("a drafter drafts up to {max_model_len} and to its own maximum position"),
    "disable_by_batch_size": left_out(_BY_RULE + "; depth 0 is plain decoding"),
    "num_speculative_tokens_per_batch_size": left_out(_BY_RULE),
    "disable_padded_drafter_batch": _AS_VERIFIER,
    "enforce_eager": _AS_VERIFIER,
    "attention_backend": _AS_VERIFIER,
    "moe_backend": _AS_VERIFIER,
    "parallel_drafting": left_out("a head's files decide whether it drafts in one pass"),
    "draft_sample_method": left_out(
        "a sampled answer has the tokens of plain decoding with its seed, whatever is drafted"
    ),
    "rejection_sample_method": becomes(
        "synthetic: {forced_acceptance}, from synthetic_acceptance_length or synthetic_acceptance_rates; others are "
        "left out, because tokens are always those of plain decoding",
        _method_of_acceptance,
    ),
    "synthetic_acceptance_length": becomes(
        "{forced_acceptance} of that length, with {adaptive} false and {draft_top_k} 1: for benchmarks alone", _length
    ),
    "synthetic_acceptance_rates": becomes(
        "{forced_acceptance} of those rates, with {adaptive} false and {draft_top_k} 1: for benchmarks alone", _rates
    ),
    "speculative_token_tree": becomes(
        "{draft_top_k} with the same paths; num_speculative_tokens is then left out", _tree
    ),
    "use_heterogeneous_vocab": left_out("tokenizer files decide which tokens a draft model shares with its verifier"),
    "draft_load_config": refused("loaders have no options: a drafter's files decide how they are read"),
    "sa_config": becomes(
        "{suffix_beside}; its fields are left out, because expected tokens decide which draft is used", _beside
    ),
    "suffix_beside": becomes("{suffix_beside}", _beside),
    **{one.name: _of_kind(kind.name, one.name) for kind in KINDS.values() for one in kind.settings},
}


def settings_of(said: Any, beside: Given) -> dict[str, Any]:
    """Returns the settings that replace `speculative_config` of a command.

    Args:
        said: `speculative_config`, an object or JSON.
        beside: other settings that the command was given.

    Raises:
        ValueError: a field is unknown, not supported, or contradicts another field; the message is one line that names
            the field.
    """
    return translate(flat({PLACE: said}), SPECULATIVE, str, (), beside=beside).settings


SPECULATIVE: dict[str, Row] = {f"{PLACE}.{name}": row for name, row in _FIELDS.items()}
"""Handling of each field of vLLM's `speculative_config`; the keys have the form `speculative_config.x`, as returned by
`flat`.
"""
