"""From a configuration to the drafter's worker; imports no verifier code, so that a replacement starts sooner."""

import torch

from wingbeat.deployments.config import AppConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.heads.target import TargetDescription


def build_draft_worker(config: AppConfig) -> DraftWorker:
    """Load the drafter of a configuration that has one.

    Raises:
        ValueError, FileNotFoundError: the checkpoint cannot be used; one line that names the tensor or field.
    """
    torch.set_num_threads(config.threads)
    target = TargetDescription.from_checkpoint(config.model_dir())
    engine_config = config.engine_config()
    options = DrafterOptions(
        getattr(torch, config.resolved_dtype()), config.drafter_device(), engine_config.cuda_graphs is not False
    )
    drafter = load_drafter(config.drafter_source(), target, engine_config.speculation, options)
    if drafter is None:
        raise ValueError(f"drafter is {config.drafter!r}: there is nothing to load")
    drafter.warn_of_long_context(config.max_model_len)
    return DraftWorker(drafter)
