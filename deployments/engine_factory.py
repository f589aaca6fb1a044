"""From a configuration to the engine: where the runtime's parts of the verifier are put together."""

import torch

from wingbeat.deployments.config import AppConfig
from wingbeat.deployments.engine_interface import ModelInfo
from wingbeat.deployments.factories import AskNeeds, EngineSetup
from wingbeat.runtime.engine import Engine
from wingbeat.runtime.model_loader import load_model


def build_engine(config: AppConfig, ask_needs: AskNeeds) -> EngineSetup:
    """Load the verifier; asks for the drafter's needs last, so that the drafter loads at the same time.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; one line that says why.
    """
    torch.set_num_threads(config.threads)
    device = torch.device(config.resolved_device())
    loaded = load_model(config.model_dir(), getattr(torch, config.dtype), device)
    engine = Engine(loaded, config.engine_config(), ask_needs())
    info = ModelInfo(
        model_name=config.model_name(),
        max_model_len=config.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        drafter=config.drafter_name(),
    )
    return EngineSetup(engine, info, engine.channel_spec if config.has_drafter() else None)
