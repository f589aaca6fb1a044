"""Opens the drafter of an engine directory."""

from dataclasses import replace
from pathlib import Path

import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.one_pass.config import Slots
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.load import load_walker, read_one_pass_checkpoint
from wingbeat.runtime.tensorrt.block_drafter import BlockDrafter
from wingbeat.runtime.tensorrt.engine_config import EngineDirectoryError
from wingbeat.runtime.tensorrt.engine_directory import BASE_CONFIG, DRAFT, DRAFT_CONFIG, EngineDirectory
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter


def open_drafter(
    folder: Path, head: str | Path, model: Path, speculation: SpeculationConfig, device: torch.device
) -> EngineDrafter | None:
    """The draft engine that replaces a head; None for kinds of drafters that torch runs.

    Raises:
        EngineDirectoryError: the directory has no draft engine, or the draft engine of another head.
        EngineLoadError: no installed library can run the draft engine on this device.
    """
    if kind_of(head, model) not in ("eagle", "one_pass"):
        return None
    directory = EngineDirectory(folder)
    config = directory.draft
    if config is None:
        raise EngineDirectoryError(
            f"{folder / BASE_CONFIG}: has_draft_model is false: rebuild the directory with this drafter"
        )
    found = checkpoint_fingerprint(Path(head))
    if found != config.weights_fingerprint:
        raise EngineDirectoryError(
            f"{folder / DRAFT_CONFIG}: weights_fingerprint is {config.weights_fingerprint}, that of {head} is {found}: "
            "rebuild the directory with this drafter"
        )
    directory.check_files(DRAFT)
    session = directory.open_session(DRAFT, device)
    graphs = CudaGraphDevice(device) if device.type == "cuda" else None
    if config.block is None:
        return EngineDrafter(session, config, directory.draft_token_ids(), speculation, graphs)
    return BlockDrafter(session, config, open_walker(directory, head, device), speculation, graphs)


def open_walker(directory: EngineDirectory, head: str | Path, device: torch.device) -> OnePassHead:
    """The one-pass head of a directory with the weights of its walk only, loaded from the head's folder.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    base, draft, checkpoint = directory.base, directory.draft, read_one_pass_checkpoint(head)
    config = checkpoint.config(base.hidden_size, base.num_decoder_layers)
    config = replace(config, tap_layers=draft.tap_layers, slots=Slots(draft.block.slots))
    return load_walker(checkpoint, config, directory.draft_token_ids(), draft.torch_dtype, device)
