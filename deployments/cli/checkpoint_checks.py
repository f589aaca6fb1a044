"""Whether an engine could start with its model, its drafter and its factories, as torch and transformers read them."""

from pathlib import Path

import torch

from wingbeat.cluster.gpus import driver_problem
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.buffer_sizes import check_channel
from wingbeat.deployments.cli.preflight import PreflightError, check_positions, drafter_is_ours
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.runtime.checks.drafter_fit import check_drafter_fits
from wingbeat.runtime.fp8_devices import check_fp8
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hugging_face import one_line, quiet
from wingbeat.runtime.kv.capacity import check_budget
from wingbeat.runtime.tensor_parallel.divisible import check_divisible
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config


def check_models(config: AppConfig, here: bool) -> None:
    """Refuse models, heads and factories that an engine could not start with.

    Args:
        here: as `preflight.is_here`.

    Raises:
        ValueError, OSError: one line that names the setting, the file or the tensor.
    """
    folder = config.model_dir()
    if here:
        _check_device(config)
        _check_factories(config)
    if config.engine_factory is None:
        _check_model(config, ConfigFile.read(folder), here)
    with quiet():
        Tokenizer.load(folder)


def _check_device(config: AppConfig) -> None:
    if config.resolved_device() != "cuda":
        return
    if not torch.cuda.is_available():
        problem = driver_problem(torch.__version__, torch.version.cuda)
        raise PreflightError(f"device is 'cuda': {problem}, or use device cpu and no num_gpus_*")
    for setting in ("kv_cache_dtype", "drafter_weights"):
        if getattr(config, setting) == "fp8":
            check_fp8(setting, torch.device("cuda", 0))
    total = torch.cuda.get_device_properties(0).total_memory
    check_budget("kv_cache_memory_bytes", config.kv_cache_memory_bytes or 0, total, "cuda")


def _check_factories(config: AppConfig) -> None:
    for path in (config.engine_factory, config.drafter_factory):
        if path is not None:
            load_factory(path)


def _check_model(config: AppConfig, file: ConfigFile, here: bool) -> None:
    loaded = load_config(file)
    text = loaded.get_text_config()
    if config.tensor_parallel_size > 1:
        check_divisible(file, loaded, config.tensor_parallel_size)
    check_positions(config, file.name, getattr(text, "max_position_embeddings", None))
    choice, taps_size = config.choice(), 0
    if drafter_is_ours(config, choice, here) and not choice.automatic:
        with one_line(file.name), quiet():
            target = TargetDescription.from_checkpoint(file.folder)
        with one_line(f"drafter {config.drafter}"):
            taps_size = check_drafter_fits(choice, target)
    if here:
        media_width = getattr(text, "hidden_size", 0) if file.has_media else 0
        check_channel(config, taps_size, getattr(text, "vocab_size", 0), media_width)
        if config.engine_dir is not None:
            _check_engines(config, file.folder)
    check_weights(file)


def _check_engines(config: AppConfig, folder: Path) -> None:
    from wingbeat.runtime.tensorrt.backend import engine_limits
    from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory

    directory = EngineDirectory(config.engine_dir)
    directory.check_model(folder)
    engine_limits(config.engine_config(), directory.base)
