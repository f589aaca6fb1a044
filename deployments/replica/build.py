"""From a configuration to what a replica's two processes run: the engine, the drafter's worker, the channel.

The drafter's process imports this file too, so what only the verifier needs is imported by `build_setup`.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.engine_loop import ServedEngine
from wingbeat.deployments.replica.supervisor import DrafterStartError
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.pair import PairSettings, drafter_of_pair, engine_of_pair
from wingbeat.runtime.protocol.messages import ChannelSpec

OWN_DEVICE = torch.device("cuda", 0)
"""`wingbeat.cluster.placement.claim_devices` puts an actor's own GPU first."""


class AskNeeds(Protocol):
    """The way to a drafter that is starting in a process of its own."""

    def __call__(self, convention: HeadConvention | None = None) -> DrafterNeeds:
        """What it needs of the verifier; blocks until it knows, raises if it cannot start.

        Args:
            convention: how it shall read its head; None where its files say that.
        """
        ...


class EngineSetup(NamedTuple):
    """What an engine factory returns."""

    engine: ServedEngine
    info: ModelInfo
    channel_spec: ChannelSpec | None
    """Of the channel its drafter attaches to; None where there is no drafter."""
    check_drafter: Callable[[Any], object] | None = None
    """Called with the idle engine, in its thread, once the first drafter is attached; raises where it is unfit."""


def build_setup(config: AppConfig, ask_needs: AskNeeds) -> EngineSetup:
    """Load the verifier; asks for the drafter's needs last, so that the drafter loads at the same time.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; one line that says why.
        DrafterStartError: the drafter's checkpoint cannot be read.
    """
    from wingbeat.deployments.replica.live_recording import needs_with_capture

    try:
        engine, _, _, check = engine_of_pair(
            _pair_settings(config),
            config.resolved_device(),
            lambda convention, loaded: needs_with_capture(config, ask_needs(convention), len(loaded.layers)),
        )
    except CheckpointError as error:
        raise DrafterStartError(f"the drafter cannot start: {type(error).__name__}: {error}") from None
    info = ModelInfo(
        model_name=config.model_name(),
        max_model_len=engine.config.max_model_len,
        vocab_size=engine.loaded.vocab_size,
        eos_token_ids=tuple(sorted(engine.loaded.eos_token_ids)),
        drafter=config.choice().label,
        num_spec_tokens=engine.config.speculation.max_path - 1 if config.has_drafter() else 0,
        num_kv_tokens=(engine.cache.num_blocks - 1) * engine.config.block_size,
    )
    return EngineSetup(engine, info, engine.channel_spec if config.has_drafter() else None, check)


def build_draft_worker(config: AppConfig) -> DraftWorker:
    """Load the drafter of a configuration that has one.

    Raises:
        ValueError, FileNotFoundError: the checkpoint cannot be used; one line that names the tensor or field.
    """
    drafter = drafter_of_pair(_pair_settings(config), config.drafter_device())
    if drafter is None:
        raise ValueError(f"drafter is {config.drafter!r}: there is nothing to load")
    return DraftWorker(drafter)


def create_channel(config: AppConfig, name: str, spec: ChannelSpec) -> ShmChannel | CudaIpcChannel:
    """The verifier's side. Raises ChannelError; one line that names what is missing."""
    if config.channel_kind() == "cuda_ipc":
        return CudaIpcChannel.create(name, spec, OWN_DEVICE)
    return ShmChannel.create(name, spec)


def attach_channel(config: AppConfig, name: str, incarnation: int) -> DrafterSide:
    """The drafter's side. Raises ChannelError; one line that names what is missing."""
    if config.channel_kind() == "cuda_ipc":
        return CudaIpcChannel.attach(name, incarnation, OWN_DEVICE)
    return ShmChannel.attach(name, incarnation)


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


def _pair_settings(config: AppConfig) -> PairSettings:
    return PairSettings(
        config.model_dir(),
        config.choice(),
        config.engine_config(),
        getattr(torch, config.resolved_dtype()),
        config.allow_bad_drafter,
        tests_drafter=config.drafter_factory is None,
        engine_dir=config.engine_dir,
    )
