"""From a configuration to the engine and to the drafter's worker: where the runtime's parts are put together."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from wingbeat.deployments.config import AppConfig
from wingbeat.deployments.engine_interface import ModelInfo
from wingbeat.deployments.engine_loop import ServedEngine
from wingbeat.runtime.batch import ChannelSpec
from wingbeat.runtime.draft_worker import DraftWorker
from wingbeat.runtime.drafters.registry import TargetDescription, load_drafter
from wingbeat.runtime.engine import Engine
from wingbeat.runtime.model_loader import load_model

TapLayers = Callable[[], tuple[int, ...]]
"""Layers whose input the drafter needs; blocks until the drafter's process knows, raises if it cannot start."""


class EngineSetup(NamedTuple):
    """What an engine factory returns."""

    engine: ServedEngine
    info: ModelInfo
    channel_spec: ChannelSpec | None
    """Of the channel its drafter attaches to; None where there is no drafter."""


def load_factory(path: str) -> Callable[..., Any]:
    """The function behind `module:function`.

    Raises:
        ValueError: there is no such module or function; the message names it.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory {path!r} cannot be loaded: {error}") from error


def build_engine(config: AppConfig, tap_layers: TapLayers) -> EngineSetup:
    """Load the verifier; asks for the tap layers last, so that the drafter loads at the same time.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; one line that says why.
    """
    torch.set_num_threads(config.threads)
    device = torch.device(config.resolved_device())
    loaded = load_model(config.model_dir(), getattr(torch, config.dtype), device)
    engine = Engine(loaded, config.engine_config(), tap_layers())
    info = ModelInfo(
        model_name=config.model_name(),
        max_model_len=config.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        drafter=config.drafter_name(),
    )
    return EngineSetup(engine, info, engine.channel_spec if config.has_drafter() else None)


def build_draft_worker(config: AppConfig) -> DraftWorker:
    """Load the drafter of a configuration that has one.

    Raises:
        ValueError, FileNotFoundError: the checkpoint cannot be used; one line that names the tensor or field.
    """
    torch.set_num_threads(config.threads)
    target = TargetDescription.from_checkpoint(config.model_dir())
    speculation = config.engine_config().speculation
    device = "cuda" if config.resolved_device() == "cuda" and config.num_gpus_per_drafter > 0 else "cpu"
    drafter = load_drafter(config.drafter_source(), target, speculation, getattr(torch, config.dtype), device)
    if drafter is None:
        raise ValueError(f"drafter is {config.drafter!r}: there is nothing to load")
    return DraftWorker(drafter)
