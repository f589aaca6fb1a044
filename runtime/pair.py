"""From settings to the two halves of a pair, each in whichever process it is to run.

What only the verifier needs is imported by `engine_of_pair`: a drafter's process starts seconds sooner without it.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.choice import FALLBACK, DrafterChoice
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.target import Lender, TargetDescription
from wingbeat.runtime.hugging_face import first_line, one_line
from wingbeat.runtime.parts import first, hooks
from wingbeat.runtime.refusals import Feature, refuse

if TYPE_CHECKING:
    from wingbeat.runtime.checks.self_test import SelfTest
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.scheduling.maskers import GrammarCompiler
    from wingbeat.runtime.tokenizer import Tokenizer
    from wingbeat.runtime.verifier.backend import Backend
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class PairSettings(NamedTuple):
    """What both halves are built from."""

    model: Path
    """The verifier's folder."""
    drafter: DrafterChoice
    engine: EngineConfig
    dtype: torch.dtype
    allow_bad_drafter: bool = False
    """Warn about a drafter that does not suit the model instead of refusing it."""
    tests_drafter: bool = True
    """False where the drafter is not Wingbeat's own: how it reads its weights and what it is worth is not asked."""
    engine_dir: Path | None = None
    """Engines that run in the place of the verifier's weights, and of an EAGLE head's; None runs torch."""
    most_threads: int | None = None
    """On CPUs, as many threads at most, tried once the verifier is loaded; None leaves torch's number."""
    fp8_drafter: bool = False
    drafter_settings: Mapping[str, Any] = MappingProxyType({})
    """Settings of the drafter's kind, `DrafterKind.settings`, that are given."""
    """Round the weights of an EAGLE head to eight bits."""
    eight_bits: bool = False
    """Round the verifier's linear layers to eight bits, for the CPU."""
    tries_bfloat16: bool = False
    """On a CPU, the verifier may have bfloat16 in the place of `dtype`: where its rounds are shorter so."""
    spread: Any = None
    """The processes that the verifier is spread over, for the part that does so; None where it is in this one alone."""

    @classmethod
    def of(
        cls,
        *,
        model: Path,
        drafter: DrafterChoice,
        engine: EngineConfig,
        dtype: str,
        threads: int,
        allow_bad_drafter: bool,
        engine_dir: Path | None,
        fp8_drafter: bool,
        drafter_settings: Mapping[str, Any],
        tries_bfloat16: bool,
        eight_bits: bool,
        tests_drafter: bool = True,
    ) -> "PairSettings":
        """As a server or an `LLM` has them.

        Args:
            dtype: its name in torch.
            drafter_settings: of its kind, `DrafterKind.settings`, that are given.
            threads: on CPUs; 0 tries as many as this process may use.
        """
        return cls(
            model=model,
            drafter=drafter,
            engine=engine,
            dtype=getattr(torch, dtype),
            allow_bad_drafter=allow_bad_drafter,
            tests_drafter=tests_drafter,
            engine_dir=engine_dir,
            most_threads=None if threads else len(os.sched_getaffinity(0)),
            fp8_drafter=fp8_drafter,
            drafter_settings=drafter_settings,
            tries_bfloat16=tries_bfloat16,
            eight_bits=eight_bits,
        )


class PairEngine(NamedTuple):
    """The verifier's half."""

    engine: "Engine"
    tokenizer: "Tokenizer | None"
    convention_choice: Any
    """How a head was found to be read, as the hook `choose_convention` answers; None where its files say that."""
    check_drafter: "Callable[[Engine], SelfTest] | None"
    """The self-test, for the idle engine once its drafter is attached, raises BadDrafterError; None for kinds without
    weights, and where a benchmark draws acceptance itself."""
    grammars: "GrammarCompiler | None"
    """Compiles what requests give as their grammar, on any thread; None serves no request with one."""


def drafter_of_pair(settings: PairSettings, device: str | torch.device, lender: Lender | None = None) -> Drafter | None:
    """Load the drafter; None where everything is decoded plainly.

    Modules of the verifier's own checkpoint that nobody has asked for, and that cannot be loaded, end no start: the
    fallback takes their place.

    Args:
        lender: of weights of the verifier that lie on the device already, in place of copies.

    Raises:
        ValueError, FileNotFoundError: a checkpoint cannot be used; one line that names the tensor or field.
    """
    if not settings.drafter.automatic:
        return _drafter(settings, device, lender)
    try:
        with one_line("the modules"):
            return _drafter(settings, device, lender)
    except (ValueError, OSError) as error:
        logger.warning(
            "drafter is auto, and %s modules of %s cannot be loaded (%s): %s drafts in their place; give a drafter "
            "to choose another one",
            settings.drafter.label.upper(),
            settings.model,
            first_line(error),
            FALLBACK.label,
        )
        return _drafter(settings._replace(drafter=FALLBACK), device, lender)


def _drafter(settings: PairSettings, device: str | torch.device, lender: Lender | None) -> Drafter | None:
    if settings.engine_dir is not None and settings.drafter.has_weights:
        drafter = first("open_drafter", settings, torch.device(device))
        if drafter is not None:
            if settings.fp8_drafter:
                fp8, of_engine = "drafter_weights is fp8", "the drafter is an engine"
                refuse({Feature.FP8_DRAFTER: fp8, Feature.DRAFTER_ENGINE: of_engine})
            return drafter
    # A class of the user's own gets what the files have, on the CPU.
    lender = lender if settings.drafter.has_weights else None
    target, config = TargetDescription.from_checkpoint(settings.model, lender), settings.engine
    _choose_kernels(settings, torch.device(device))
    given = settings.drafter_settings
    options = DrafterOptions(settings.dtype, device, config.may_capture, settings.fp8_drafter, given)
    drafter = load_drafter(settings.drafter.source, target, config.speculation, options)
    if drafter is not None:
        drafter.warn_of_long_context(config.max_model_len)
    return drafter


def engine_of_pair(
    settings: PairSettings,
    device: str | torch.device,
    ask_needs: "Callable[[HeadConvention | None, LoadedModel], DrafterNeeds]",
) -> PairEngine:
    """Load the verifier.

    Args:
        ask_needs: what the drafter needs, given how it shall read its head (None where its files say that) and the
            verifier; asked last, so that a drafter of another process loads at the same time.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; one line that says why.
        CheckpointError: the drafter's head cannot be read.
    """
    from wingbeat.runtime.checks.graph_check import check_graphs
    from wingbeat.runtime.checks.self_test import check_drafter
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.engine.memory import fit_to_memory
    from wingbeat.runtime.generation_config import read_rules
    from wingbeat.runtime.scheduling.maskers import grammar_compiler
    from wingbeat.runtime.tokenizer import Tokenizer

    _refuse_what_cannot_run(settings, torch.device(device))
    _choose_kernels(settings, torch.device(device))
    loaded, limits, backend = _verifier_of_pair(settings, torch.device(device))
    tokenizer, choice, check = Tokenizer.find(settings.model), None, None
    rules = read_rules(settings.model, loaded.vocab_size, tokenizer)
    loaded.eos_token_ids |= rules.eos_token_ids
    if rules.not_applied:
        logger.warning("%s", rules.not_applied)
    drafter = settings.drafter
    if drafter.has_weights and settings.tests_drafter:
        target = TargetDescription.from_checkpoint(settings.model)
        if settings.engine_dir is None:  # an engine was read when it was exported
            choice = first("choose_convention", drafter.source, target, loaded, tokenizer)
        if settings.engine.forced_acceptance is None:
            allow_bad = settings.allow_bad_drafter or drafter.automatic
            check = partial(check_drafter, tokenizer=tokenizer, name=drafter.label, allow_bad=allow_bad)
    needs = ask_needs(None if choice is None else choice.best.convention, loaded)
    _choose_threads(loaded, settings)
    limits = fit_to_memory(loaded, limits, needs)
    engine = Engine(loaded, limits, needs, backend=backend)
    engine.rules = rules
    check_graphs(engine, tokenizer)
    grammars = grammar_compiler(tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    return PairEngine(engine, tokenizer, choice, check, grammars)


def _refuse_what_cannot_run(settings: PairSettings, device: torch.device) -> None:
    """Before anything is compiled or read.

    Raises:
        ValueError: one line that says why.
    """
    asked = settings.engine.asked()
    asked[Feature.CPU if device.type == "cpu" else Feature.CUDA] = f"device is {device.type}"
    if settings.engine_dir is not None:
        asked[Feature.ENGINE_DIR] = "engine_dir is given"
    if settings.eight_bits:
        asked[Feature.INT8] = "dtype is int8"
    refuse(asked)


def _verifier_of_pair(settings: PairSettings, device: torch.device) -> "tuple[LoadedModel, EngineConfig, Backend]":
    """The verifier, the limits of an engine over it, and what runs it."""
    from wingbeat.runtime.verifier.backend import TORCH

    opened = first("open_backend", settings, device)
    return (_load(settings, device), settings.engine, TORCH) if opened is None else opened


def _choose_kernels(settings: PairSettings, device: torch.device) -> None:
    """Each half chooses for its own process."""
    if device.type == "cuda":
        from wingbeat.runtime.checks.kernel_check import choose_kernels

        fp8_cache = settings.engine.kv_cache_dtype == "fp8"
        choose_kernels(settings.engine.kernels, device, settings.dtype, fp8_cache, settings.model)


def _load(settings: PairSettings, device: torch.device) -> "LoadedModel":
    """By torch, in this process alone."""
    from wingbeat.runtime.verifier.loading.cpu_dtype import has_bfloat16_units, load_in_faster_dtype
    from wingbeat.runtime.verifier.loading.loader import load_model

    deterministic = settings.engine.deterministic
    if settings.tries_bfloat16 and has_bfloat16_units():
        loaded = load_in_faster_dtype(settings.model, device, deterministic)
    else:
        loaded = load_model(settings.model, settings.dtype, device, deterministic, settings.eight_bits)
    for extend in hooks("extend_model"):
        extend(loaded, settings.engine)
    return loaded


def _choose_threads(loaded: "LoadedModel", settings: PairSettings) -> None:
    """Tried once a drafter of another process has loaded: a core that this takes would seem to be worth nothing."""
    from wingbeat.runtime.verifier.loading.cpu_threads import choose_threads

    if settings.most_threads is not None and settings.engine_dir is None and loaded.device.type == "cpu":
        choose_threads(loaded, settings.most_threads)
