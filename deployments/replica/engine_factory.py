"""From a configuration to the engine: where the runtime's parts of the verifier are put together."""

import torch

from wingbeat.deployments.config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.factories import AskNeeds, EngineSetup
from wingbeat.deployments.replica.live_recording import needs_with_capture
from wingbeat.deployments.replica.supervisor import DrafterStartError
from wingbeat.runtime.checks.readings import choose_convention
from wingbeat.runtime.checks.self_test import SelfTest, check_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loader import LoadedModel, load_model


def build_engine(config: AppConfig, ask_needs: AskNeeds) -> EngineSetup:
    """Load the verifier; asks for the drafter's needs last, so that the drafter loads at the same time.

    Raises:
        ValueError, FileNotFoundError: the model or a limit cannot be used; one line that says why.
        DrafterStartError: the drafter's checkpoint cannot be read.
    """
    torch.set_num_threads(config.threads)
    device = torch.device(config.resolved_device())
    loaded = load_model(config.model_dir(), getattr(torch, config.resolved_dtype()), device)
    tried = config.tests_drafter()
    tokenizer = Tokenizer.find(config.model_dir()) if tried else None
    needs = ask_needs(_convention(config, loaded, tokenizer) if tried else None)
    needs = needs_with_capture(config, needs, len(loaded.layers))
    engine = Engine(loaded, config.engine_config(), needs)
    info = ModelInfo(
        model_name=config.model_name(),
        max_model_len=config.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        drafter=config.drafter_name(),
    )

    def check(engine: Engine) -> SelfTest:
        return check_drafter(engine, tokenizer, config.drafter_name(), config.allow_bad_drafter)

    return EngineSetup(engine, info, engine.channel_spec if config.has_drafter() else None, check if tried else None)


def _convention(config: AppConfig, loaded: LoadedModel, tokenizer: Tokenizer | None) -> HeadConvention | None:
    """How the drafter is to read its head, where its files leave that open."""
    target = TargetDescription.from_checkpoint(config.model_dir())
    try:
        choice = choose_convention(config.drafter_source(), target, loaded, tokenizer)
    except ValueError as error:
        raise DrafterStartError(f"the drafter cannot start: {type(error).__name__}: {error}") from None
    return None if choice is None else choice.best.convention
