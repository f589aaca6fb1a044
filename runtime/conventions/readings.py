"""Chooses among the conventions that a head's files allow, by trying each convention on text that the verifier
generated.

A head that is read under the wrong convention drafts badly without an error; the convention with the longest accepted
chains is the right one. The trial needs the verifier in this process; the drafter need not run. Results are cached on
disk per pair of checkpoints.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.disk_cache import cache_dir, keep, recall
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.choice import KINDS
from wingbeat.runtime.drafters.registry import kind_of, load_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine_checks.trial_prompts import trial_requests
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

_NUM_TEXTS = 32
_NUM_TOKENS = 32
"""Number of tokens generated per text, without the prompt."""
_LONGEST_PROMPT = 64
_CHAIN = 4
"""Number of drafted tokens per chain. Wrong taps lower the acceptance of all tokens, wrong feedback that of the second
and later tokens.
"""
_ROWS = 4
"""Number of texts per pass of a head; limits the memory that the head's logits need."""
_CLEAR = 2.0
"""A convention is chosen instead of the likeliest convention if its gain exceeds this number of standard errors."""
_VERSION = 2
Matches = Callable[[Any, Tensor, Tensor, int], Tensor]
"""See `DrafterKind.matches`."""


class Reading(NamedTuple):
    """A convention and its measured result."""

    convention: HeadConvention
    length: float
    """Mean tokens per chain of `_CHAIN` drafts, including the bonus token."""
    by_depth: tuple[float, ...]
    """Acceptance rate by depth: the share of right drafts among the drafts whose predecessors in the chain were all
    right.
    """
    gain: float
    """Difference between `length` and the `length` of the likeliest convention."""
    gain_error: float
    """Standard error of the gain over the texts."""


class ConventionChoice(NamedTuple):
    """The measured conventions. The first is the convention that is likeliest according to the head's files."""

    readings: tuple[Reading, ...]

    @property
    def best(self) -> Reading:
        """The convention with the largest significant gain; the likeliest convention if no gain is significant."""
        clear = [reading for reading in self.readings if reading.gain > _CLEAR * reading.gain_error]
        return max(clear, key=lambda reading: reading.gain, default=self.readings[0])

    def as_dict(self) -> dict[str, Any]:
        """The choice in a form that can be written as JSON and read by `from_dict`."""
        return {"readings": [{**one._asdict(), "convention": one.convention._asdict()} for one in self.readings]}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ConventionChoice":
        """Reads the result of `as_dict`; raises KeyError or TypeError for other values."""
        return cls(tuple(_reading(one) for one in raw["readings"]))


def _reading(raw: dict[str, Any]) -> Reading:
    convention = raw["convention"] | {"tap_layers": tuple(raw["convention"]["tap_layers"])}
    return Reading(**raw | {"convention": HeadConvention(**convention), "by_depth": tuple(raw["by_depth"])})


def choose_convention(
    source: str | Path, target: TargetDescription, loaded: LoadedModel, tokenizer: Tokenizer | None
) -> ConventionChoice | None:
    """Measure the conventions of a head, or read an earlier measurement of the same two checkpoints from the cache.

    Args:
        source: value of the setting `drafter`.
        target, loaded: the verifier.
        tokenizer: the verifier's tokenizer, if there is one.

    Returns:
        None if there is nothing to choose, because the drafter is of another kind or the head's files allow a single
            convention.

    Raises:
        CheckpointError: the head cannot be read under any convention.
    """
    kind = KINDS.get(kind_of(source, target.path))
    if kind is None or kind.readings is None:
        return None
    candidates = load_function(kind.readings)(source, target, _CHAIN)
    if len(candidates) == 1:
        return None
    parts = (_VERSION, checkpoint_fingerprint(Path(source)), checkpoint_fingerprint(target.path), candidates)
    kept = cache_dir() / f"convention-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.json"
    choice, how = recall(kept, ConventionChoice.from_dict), "recalled"
    if choice is None:
        options = DrafterOptions(loaded.dtype, loaded.device, cuda_graphs=False)
        drafter = load_drafter(source, target, SpeculationConfig(_CHAIN, 1), options)
        matches = load_function(kind.matches or "wingbeat.runtime.heads.unroll:matches")
        choice, how = measure_readings(drafter.head, matches, candidates, loaded, tokenizer), "measured"
        keep(kept, choice.as_dict())
    logger.info("drafter %s: %s", source, describe(choice, how))
    return choice


def describe(choice: ConventionChoice, how: str = "measured") -> str:
    """A line of text with the chosen convention and all results."""
    best = choice.best
    others = [f"{_words(one.convention)}: {one.length:.2f}" for one in choice.readings if one is not best]
    return (
        f"read with {_words(best.convention)}, {how} at {best.length:.2f} tokens per chain of {_CHAIN}; "
        f"other readings gave {'; '.join(others)}"
    )


def _words(convention: HeadConvention) -> str:
    fields = convention._asdict() | {"tap_layers": list(convention.tap_layers)}
    return ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


@torch.inference_mode()
def measure_readings(
    head: Any,
    matches: Matches,
    candidates: Sequence[HeadConvention],
    loaded: LoadedModel,
    tokenizer: Tokenizer | None,
) -> ConventionChoice:
    """Run greedy chains of every convention over texts that the verifier generated.

    All conventions use the taps of one verifier pass over the texts. A draft counts only if all previous drafts of its
    chain equal the text. In that case the head has read the same tokens as in drafting, so the result equals what the
    engine would accept, up to rounding.

    Args:
        head: the head, with `dtype` and `with_convention(convention)`.
        matches: compares drafts with the text.
        candidates: the conventions.
        loaded: the verifier.
        tokenizer: the verifier's tokenizer, if there is one.
    """
    layers = tuple(sorted({layer for convention in candidates for layer in convention.tap_layers}))
    engine = Engine(loaded, _engine_config(loaded), DrafterNeeds(layers, keeps_context=True))
    try:
        texts = _write_texts(engine, tokenizer)
        tokens = torch.zeros(len(texts.token_ids), max(map(len, texts.token_ids)), dtype=torch.int64)
        for row, token_ids in enumerate(texts.token_ids):
            tokens[row, : len(token_ids)] = torch.tensor(token_ids)
        tokens = tokens.to(loaded.device)
        # Attention is causal, so padding after the end of a text does not change the text's taps.
        taps = engine.model.observe(tokens).unflatten(-1, (len(layers), -1))
    finally:
        engine.model.remove_taps()
    chains = _chains(texts, tokens)
    accepted = []
    for convention in candidates:
        columns = [layers.index(layer) for layer in convention.tap_layers]
        own_taps = taps[:, :, columns].flatten(-2).to(head.dtype)
        accepted.append(_accepted(head.with_convention(convention), matches, tokens, own_taps, chains))
    return ConventionChoice(
        tuple(
            _summary(convention, own, accepted[0], chains) for convention, own in zip(candidates, accepted, strict=True)
        )
    )


def _accepted(head: Any, matches: Matches, tokens: Tensor, taps: Tensor, chains: Tensor) -> Tensor:
    """int64 [num_texts, num_chains, _CHAIN] on the CPU: 1 if a draft and all previous drafts of its chain are right."""
    parts = zip(tokens.split(_ROWS), taps.split(_ROWS), strict=True)
    hits = torch.cat([matches(head, part, part_taps, _CHAIN) for part, part_taps in parts])
    return (hits.long().cumprod(-1) * chains[:, :, None]).cpu()


def _summary(convention: HeadConvention, accepted: Tensor, likeliest: Tensor, chains: Tensor) -> Reading:
    right = accepted.sum((0, 1)).tolist()
    tried = [int(chains.sum()), *right[:-1]]
    by_depth = tuple(round(now / max(before, 1), 4) for now, before in zip(right, tried, strict=True))
    # The standard error is computed from one mean per text, because the chains of a text are correlated, whereas texts
    # are independent.
    gains = (accepted - likeliest).sum((1, 2)) / chains.sum(1).cpu()
    error = float(gains.std()) / len(gains) ** 0.5
    return Reading(convention, 1 + sum(right) / tried[0], by_depth, float(gains.mean()), error)


def _chains(texts: "_Texts", tokens: Tensor) -> Tensor:
    """bool [num_texts, num_chains]: chains within the generated text.

    Chain i reads token i + 1 and drafts `_CHAIN` tokens.

    The first chain reads the first generated token, as in the engine's first round.
    """
    first = torch.tensor(texts.prompt_lens, device=tokens.device)[:, None] - 1
    ends = torch.tensor([len(token_ids) for token_ids in texts.token_ids], device=tokens.device)[:, None]
    chain = torch.arange(tokens.shape[1] - _CHAIN - 1, device=tokens.device)
    return (chain >= first) & (chain + 1 + _CHAIN < ends)


class _Texts(NamedTuple):
    token_ids: list[list[int]]
    """Token ids of each text, including the prompt."""
    prompt_lens: list[int]


def _engine_config(loaded: LoadedModel) -> EngineConfig:
    max_model_len = min(_LONGEST_PROMPT + _NUM_TOKENS, loaded.max_position_embeddings)
    limits = EngineConfig(max_num_seqs=_NUM_TEXTS, max_model_len=max_model_len)
    return EngineConfig(
        max_num_seqs=_NUM_TEXTS,
        max_model_len=max_model_len,
        num_kv_blocks=1 + _NUM_TEXTS * limits.max_blocks_per_seq,
        cuda_graphs=False,
        overlap=False,
    )


def _write_texts(engine: Engine, tokenizer: Tokenizer | None) -> _Texts:
    """Generates the texts: half of them greedily, the others sampled with different seeds."""
    requests = trial_requests(engine.loaded, tokenizer, _NUM_TEXTS, _NUM_TOKENS, engine.config.max_model_len)
    texts = {request.request_id: list(request.prompt_token_ids) for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    return _Texts(list(texts.values()), [len(request.prompt_token_ids) for request in requests])
