"""Builds what the two processes of a pair run: the engine, and the drafter's worker.

The drafter's process imports this file too, so modules that only the verifier needs are imported inside `build_setup`.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.cluster.gpu_driver import driver_problem
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.parts import first_result, hooks, merged
from wingbeat.deployments.replica.engine.engine_setup import AskNeeds, DrafterStartError, DrafterTerms, EngineSetup
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.deployments.replica.engine.pair_channel import OWN_DEVICE
from wingbeat.runtime import parts as runtime_parts
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.target import Lender
from wingbeat.runtime.pair import PairSettings, drafter_of_pair, engine_of_pair, most_threads

if TYPE_CHECKING:
    from wingbeat.runtime.inner_drafter import ChannelFactory, InnerDrafter
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def build_setup(config: AppConfig, ask_needs: AskNeeds, spread: Any = None) -> EngineSetup:
    """Load the verifier and build its engine.

    The drafter's needs are requested only after the verifier is loaded, so that the two models load in parallel.

    Args:
        spread: see `PairSettings`.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; the message is one line that names the
            reason.
        DrafterStartError: the drafter's checkpoint cannot be read.
    """
    _check_device(config)
    inner, read_as = _inner_drafter(config), None

    def needs(convention: HeadConvention | None, loaded: "LoadedModel") -> DrafterNeeds:
        nonlocal read_as
        read_as = convention
        if config.drafts_in_engine():
            asked = inner.needs(convention, loaded)
        else:
            loan = first_result("lend", config, loaded, OWN_DEVICE)
            asked = ask_needs(DrafterTerms(convention, loan, runtime_parts.first_result("rows_of", loaded)))
        return first_result("tapped", config, asked, len(loaded.layers)) or asked

    try:
        settings = pair_settings(config)._replace(spread=spread)
        engine, _, _, check, grammars = engine_of_pair(settings, config.resolved_device(), needs)
    except CheckpointError as error:
        raise DrafterStartError(f"the drafter cannot start: {error}") from None
    info = ModelInfo(
        model_name=config.model_name(),
        max_model_len=engine.config.max_model_len,
        max_num_seqs=engine.config.max_num_seqs,
        vocab_size=engine.loaded.vocab_size,
        eos_token_ids=tuple(sorted(engine.loaded.eos_token_ids)),
        dtype=str(engine.loaded.dtype).removeprefix("torch."),
        drafter=config.choice().label,
        drafts_from_other_requests=config.choice().drafts_from_other_requests or engine.drafts_from_other_requests,
        num_spec_tokens=engine.config.speculation.max_path - 1 if config.has_drafter() else 0,
        num_kv_tokens=(engine.cache.num_blocks - 1) * engine.config.block_size,
        block_size=engine.config.block_size if engine.config.enable_prefix_caching else 0,
        variants=tuple(one for of_part in hooks("variants") for one in of_part(config, engine)),
        takes=engine.loaded.takes,
    )
    spec = engine.channel_spec if config.has_drafter() and not config.drafts_in_engine() else None

    def take_in(channel_factory: "ChannelFactory") -> None:
        inner.take(engine, read_as, channel_factory)

    keepers = merged("keepers", config, engine)
    kept = engine.block_manager.log, keepers
    served_grammars = None if grammars is None else first_result("serve_grammars", grammars)
    served = first_result("serve_engine", config, engine) or engine
    return EngineSetup(served, info, spec, check, *kept, take_in if config.has_drafter() else None, served_grammars)


def _check_device(config: AppConfig) -> None:
    if config.resolved_device() == "cuda" and not torch.cuda.is_available():
        problem = driver_problem(torch.__version__, torch.version.cuda)
        raise ValueError(f"device is 'cuda': {problem}, or use device cpu and no num_gpus_*")


def _inner_drafter(config: AppConfig) -> "InnerDrafter":
    """Return an object that can load the drafter in the engine's process."""
    from wingbeat.runtime.inner_drafter import InnerDrafter

    factory = config.drafter_factory
    load = (lambda lender: load_factory(factory)(config)) if factory else partial(build_draft_worker, config)
    return InnerDrafter(pair_settings(config), config.drafter_device(), load)


def build_draft_worker(config: AppConfig, lender: Lender | None = None) -> DraftWorker:
    """Load the drafter of a configuration. The configuration must have a drafter.

    Args:
        lender: source of weights that the drafter can share with the verifier; with None, all weights are loaded.

    Raises:
        ValueError, FileNotFoundError: the checkpoint cannot be used; the message is one line that names the tensor or
            field.
    """
    drafter = drafter_of_pair(pair_settings(config), config.drafter_device(), lender)
    if drafter is None:
        raise ValueError(f"drafter is {config.drafter!r}: there is nothing to load")
    worker = DraftWorker(drafter)
    for follow_head in hooks("follow_head"):
        follow_head(config, worker)
    return worker


def needs_loaded_here(config: AppConfig, convention: HeadConvention | None) -> DrafterNeeds:
    """Return the needs of a drafter whose process may not be running yet.

    The drafter is loaded in this process, and is freed once its needs are known.

    Raises:
        ValueError, FileNotFoundError: as `build_draft_worker`.
    """
    if config.drafter_factory is not None:
        drafter = load_factory(config.drafter_factory)(config).drafter
    else:
        drafter = drafter_of_pair(pair_settings(config), "cpu")
    if convention is not None:
        drafter.read_as(convention)
    return drafter.needs


def pair_settings(config: AppConfig) -> PairSettings:
    """Return the part of the configuration that concerns the verifier and its drafter."""
    return PairSettings(
        model=config.model_dir(),
        drafter=config.choice(),
        engine=config.engine_config(),
        dtype=getattr(torch, config.resolved_dtype()),
        most_threads=most_threads(config.num_threads()),
        allow_bad_drafter=config.allow_bad_drafter or bool(first_result("keeps_weak_head", config)),
        engine_dir=config.engine_dir,
        fp8_drafter=config.drafter_weights == "fp8",
        drafter_settings=config.drafter_settings(),
        eight_bits=config.rounds_weights(),
        tries_bfloat16=config.tries_bfloat16(),
        tests_drafter=config.drafter_factory is None,
    )
