"""Builds the two halves of a pair (verifier engine, drafter) from settings, each in the process that runs it.

`engine_of_pair` imports the modules that only the verifier needs, so that a drafter's process starts seconds sooner.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wingbeat.kernels import choice
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.choice import FALLBACK, DrafterChoice
from wingbeat.runtime.drafters.registry import check_fits, load_drafter
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.target import Lender, TargetDescription
from wingbeat.runtime.hugging_face import first_line, one_line
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.refusals import Feature, refuse
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.scheduling.maskers import GrammarCompiler
    from wingbeat.runtime.tokenizer import Tokenizer
    from wingbeat.runtime.verifier.backend import Backend
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class PairSettings(NamedTuple):
    """Settings from which verifier engine and drafter are built."""

    model: Path
    """The verifier's folder."""
    drafter: DrafterChoice
    engine: EngineConfig
    dtype: torch.dtype
    allow_bad_drafter: bool = False
    """Whether a drafter that does not suit the model only causes a warning, instead of an error."""
    tests_drafter: bool = True
    """Whether the head's conventions and acceptance are tested; False for a drafter from outside Wingbeat."""
    engine_dir: Path | None = None
    """Directory of compiled engines that run instead of torch, for the verifier and for an EAGLE head; None runs torch.
    """
    most_threads: int | None = None
    """Maximum number of CPU threads to try once the verifier is loaded; None keeps torch's number of threads."""
    fp8_drafter: bool = False
    """Whether the weights of an EAGLE head are rounded to float8."""
    drafter_settings: Mapping[str, Any] = MappingProxyType({})
    """Settings that the user gave for this kind of drafter, see `DrafterKind.settings`."""
    eight_bits: bool = False
    """Whether the weights of the verifier's linear layers are rounded to eight bits, on a CPU."""
    tries_bfloat16: bool = False
    """Whether, on a CPU, the verifier may use bfloat16 instead of `dtype` if its rounds are faster."""
    spread: Any = None
    """Processes among which the verifier is divided, as the runtime part for tensor parallelism describes them; None
    for this process alone."""


def most_threads(threads: int) -> int | None:
    """Returns `PairSettings.most_threads` for a setting of CPU threads: None, or for 0 the cores that this process may
    use.
    """
    return None if threads else len(os.sched_getaffinity(0))


class PairEngine(NamedTuple):
    """The verifier's half of a pair: a built engine and the objects that belong to it."""

    engine: "Engine"
    tokenizer: "Tokenizer | None"
    convention_choice: Any
    """Result of the hook `choose_convention`: the convention by which the head is interpreted. None if the head's files
    define the convention."""
    check_drafter: "Callable[[Engine], Any] | None"
    """Self-test of an idle engine with its drafter attached, which raises ValueError for a bad drafter. None for
    drafters without weights, and in benchmarks with forced acceptance."""
    grammars: "GrammarCompiler | None"
    """Compiles requests' grammars, on any thread; None if requests with a grammar are not supported."""


def drafter_of_pair(settings: PairSettings, device: str | torch.device, lender: Lender | None = None) -> Drafter | None:
    """Loads the drafter; returns None without speculation.

    With drafter auto, if the MTP modules of the verifier's checkpoint cannot be loaded, the fallback drafter is used
    instead.

    Args:
        lender: function that returns weights of the verifier that are already on the device, so that the drafter shares
            these weights instead of copying them.

    Raises:
        ValueError, FileNotFoundError: a checkpoint cannot be used; the message is one line that names the tensor or
            field.
    """
    if not settings.drafter.automatic:
        return _drafter(settings, device, lender)
    try:
        with one_line("the modules"):
            return _drafter(settings, device, lender)
    except (ValueError, OSError) as error:
        logger.warning(
            "drafter is auto, and %s modules of %s cannot be loaded (%s): using drafter %s instead; set drafter "
            "to choose another",
            settings.drafter.label.upper(),
            settings.model,
            first_line(error),
            FALLBACK.label,
        )
        return _drafter(settings._replace(drafter=FALLBACK), device, lender)


def _drafter(settings: PairSettings, device: str | torch.device, lender: Lender | None) -> Drafter | None:
    if settings.engine_dir is not None and settings.drafter.has_weights:
        drafter = first_result("open_drafter", settings, torch.device(device))
        if drafter is not None:
            if settings.fp8_drafter:
                fp8, of_engine = "drafter_weights is fp8", "the drafter is an engine"
                refuse({Feature.FP8_DRAFTER: fp8, Feature.DRAFTER_ENGINE: of_engine})
            return drafter
    # A user-defined drafter class receives the weights as copies on the CPU, read from the files.
    lender = lender if settings.drafter.has_weights else None
    target, config = TargetDescription.from_checkpoint(settings.model, lender), settings.engine
    choose_kernels(settings.engine, torch.device(device), settings.dtype, settings.model)
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
    """Loads the verifier and builds its engine.

    Args:
        ask_needs: function that returns the drafter's needs, given the verifier and the convention of the drafter's
            head (None if the head's files define the convention). The function is called last, so that a drafter in
            another process loads meanwhile.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; the message is one line with the reason.
        CheckpointError: the drafter's head cannot be read.
    """
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.engine.memory import fit_to_memory
    from wingbeat.runtime.scheduling.maskers import grammar_compiler
    from wingbeat.runtime.tokenizer import Tokenizer

    _refuse_what_cannot_run(settings, torch.device(device))
    choose_kernels(settings.engine, torch.device(device), settings.dtype, settings.model)
    tests_drafter = settings.drafter.has_weights and settings.tests_drafter
    if tests_drafter and settings.engine_dir is None:  # compiled engines were checked when they were exported
        _check_drafter(settings)
    loaded, limits, backend = _verifier_of_pair(settings, torch.device(device))
    tokenizer, convention, check = Tokenizer.find(settings.model), None, None
    rules = first_result("request_rules", settings.model, loaded.vocab_size)
    if tokenizer is not None:
        loaded.eos_token_ids |= tokenizer.ends_of_turns(loaded.vocab_size)
    drafter = settings.drafter
    if tests_drafter:
        target = TargetDescription.from_checkpoint(settings.model)
        if settings.engine_dir is None:
            convention = first_result("choose_convention", drafter.source, target, loaded, tokenizer)
        if settings.engine.forced_acceptance is None:
            allow_bad = settings.allow_bad_drafter or drafter.automatic
            check = first_result("drafter_check", tokenizer, drafter.label, allow_bad)
    needs = ask_needs(None if convention is None else convention.best.convention, loaded)
    _choose_threads(loaded, settings)
    limits = fit_to_memory(loaded, limits, needs)
    engine = Engine(loaded, limits, needs, backend=backend)
    engine.request_rules = rules or engine.request_rules
    for check_graphs in hooks("check_graphs"):
        check_graphs(engine, tokenizer)
    grammars = grammar_compiler(tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    return PairEngine(engine, tokenizer, convention, check, grammars)


def _refuse_what_cannot_run(settings: PairSettings, device: torch.device) -> None:
    """Refuses impossible combinations of settings, before anything is compiled or read.

    Raises:
        ValueError: settings exclude each other; the message is one line with the reason.
    """
    asked = settings.engine.asked()
    asked[Feature.CPU if device.type == "cpu" else Feature.CUDA] = f"device is {device.type}"
    if settings.engine_dir is not None:
        asked[Feature.ENGINE_DIR] = "engine_dir is given"
    if settings.eight_bits:
        asked[Feature.INT8] = "dtype is int8"
    refuse(asked)


def _check_drafter(settings: PairSettings) -> None:
    """Refuses a head of another verifier, before weights are read.

    Raises:
        ValueError: the head cannot be read, or a size differs; the message is one line that names the head and both
            values.
    """
    load_config(ConfigFile.read(settings.model))  # raises a better error for a folder that is no causal LM
    try:
        check_fits(settings.drafter.source, TargetDescription.from_checkpoint(settings.model))
    except CheckpointError as error:
        raise type(error)(f"drafter {settings.drafter.label}: {error}") from error


def _verifier_of_pair(settings: PairSettings, device: torch.device) -> "tuple[LoadedModel, EngineConfig, Backend]":
    """Returns the verifier, the configuration of an engine with this verifier, and the backend."""
    from wingbeat.runtime.verifier.backend import TORCH

    opened = first_result("open_backend", settings, device)
    return (load_verifier(settings, device), settings.engine, TORCH) if opened is None else opened


def choose_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype, model: Path | None) -> None:
    """Chooses the kernels of this process; verifier and drafter each call this function in their own process."""
    if device.type != "cuda":
        return
    if config.kernels == "torch":
        choice.replace(*choice.KERNELS)
        return
    for choose in hooks("choose_kernels"):
        choose(device, dtype, config.kv_cache_dtype == "fp8", model)


def load_verifier(settings: PairSettings, device: torch.device) -> "LoadedModel":
    """Loads the verifier with torch, in this process alone."""
    from wingbeat.runtime.verifier.loading.loader import load_model

    deterministic, loaded = settings.engine.deterministic, None
    if settings.tries_bfloat16:
        loaded = first_result("load_in_faster_dtype", settings.model, device, deterministic)
    if loaded is None:
        loaded = load_model(settings.model, settings.dtype, device, deterministic, settings.eight_bits)
    for extend in hooks("extend_model"):
        extend(loaded, settings.engine)
    return loaded


def _choose_threads(loaded: "LoadedModel", settings: PairSettings) -> None:
    """Chooses the number of CPU threads by timing.

    Called after a drafter in another process has loaded, because loading a drafter would disturb the timing.
    """
    if settings.most_threads is not None and settings.engine_dir is None and loaded.device.type == "cpu":
        for choose_threads in hooks("choose_threads"):
            choose_threads(loaded, settings.most_threads)
