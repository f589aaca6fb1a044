"""The backend `tensorrt`: engines in the place of the verifier's and the drafter's weights."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.tensorrt.base_runner import BaseRunner
from wingbeat.runtime.tensorrt.builders import find_builder
from wingbeat.runtime.tensorrt.engine_config import EngineDirectoryError
from wingbeat.runtime.tensorrt.engine_directory import BASE, BASE_CONFIG, DRAFT, DRAFT_CONFIG, EngineDirectory
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.engine_model import EngineModel, LoadedEngine, engine_limits, linear_kv
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.onnx_session import OnnxSession
from wingbeat.runtime.tensorrt.session import BASE_STAGES, DRAFT_STAGES, EngineLoadError, EngineSession, EngineStage
from wingbeat.runtime.verifier.backend import Backend

logger = logging.getLogger(__name__)
IN_PLACE_OPSET = 24


class TensorRTBackend(Backend):
    """Runs a verifier's engine.

    Args:
        session: of `eagle_base`.
        graph_device: captures verification and plain decoding.
    """

    on_host = False

    def __init__(
        self, directory: EngineDirectory, session: EngineSession, graph_device: GraphDevice | None = None
    ) -> None:
        self.directory = directory
        self.session = session
        self.graph_device = graph_device

    def parts(
        self, loaded: LoadedEngine, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[EngineModel, LinearKV]:
        """See `Backend.parts`."""
        kv = linear_kv(loaded, config)
        runner = BaseRunner(self.session, self.directory.base, kv, self.graph_device)
        model = EngineModel(runner, tap_layers, kv_layers, self.directory.folder)
        if self.graph_device is not None:
            runner.capture(config.speculation.num_nodes if model.taps_size else None)
        return model, kv


class OpenedEngine(NamedTuple):
    """A verifier's half on this backend."""

    loaded: LoadedEngine
    limits: EngineConfig
    backend: TensorRTBackend


def open_backend(
    folder: Path, model: Path, limits: EngineConfig, device: torch.device, threads: int | None = None
) -> OpenedEngine:
    """Load an engine directory's verifier.

    Args:
        model: the checkpoint that is served; its weights, where it has some, must be those of the directory.
        limits: as they were asked for.
        threads: of ONNX Runtime; None takes torch's.

    Raises:
        EngineDirectoryError: a file is missing or another one.
        EngineLoadError: nothing here runs it.
        ValueError: a limit is above the engine's.
    """
    directory = EngineDirectory(folder)
    directory.check_files(BASE)
    check_model(directory, model)
    limits = engine_limits(limits, directory.base)
    session = open_session(directory, BASE, BASE_STAGES, device, threads)
    backend = TensorRTBackend(directory, session, CudaGraphDevice(device) if device.type == "cuda" else None)
    return OpenedEngine(LoadedEngine.of(directory.base, device), limits, backend)


def engine_drafter(
    folder: Path, drafter: str | Path, model: Path, config: EngineConfig, device: str | torch.device
) -> EngineDrafter | None:
    """The directory's draft engine in the place of an EAGLE head; None for other kinds, which torch runs.

    Raises:
        EngineDirectoryError: the directory has none, or one of another head; EngineLoadError: nothing here runs it.
    """
    if kind_of(drafter, model) != "eagle":
        return None
    directory = EngineDirectory(folder)
    if directory.draft is None:
        raise EngineDirectoryError(f"{folder / BASE_CONFIG}: has_draft_model is false: build it with this drafter")
    found, expected = checkpoint_fingerprint(Path(drafter)), directory.draft.weights_fingerprint
    if found != expected:
        raise EngineDirectoryError(
            f"{folder / DRAFT_CONFIG}: weights_fingerprint is {expected}, that of {drafter} is {found}: build it "
            "anew with this drafter"
        )
    directory.check_files(DRAFT)
    return open_drafter(directory, config.speculation, torch.device(device))


def open_drafter(
    directory: EngineDirectory, speculation: SpeculationConfig, device: torch.device, threads: int | None = None
) -> EngineDrafter:
    """Load a directory's drafter, which it has.

    Raises:
        EngineDirectoryError: a file cannot be read; EngineLoadError: nothing here runs it.
    """
    session = open_session(directory, DRAFT, DRAFT_STAGES, device, threads)
    graphs = CudaGraphDevice(device) if device.type == "cuda" else None
    return EngineDrafter(session, directory.draft, directory.draft_token_ids(), speculation, graphs)


def open_session(
    directory: EngineDirectory, name: str, stages: tuple[EngineStage, ...], device: torch.device, threads: int | None
) -> EngineSession:
    """The engine on a GPU, by the library that built it; its ONNX file on a CPU, by ONNX Runtime."""
    if device.type == "cpu":
        return OnnxSession(directory.graph(name, ".onnx"), threads or torch.get_num_threads())
    from wingbeat.runtime.tensorrt.tensorrt_session import TensorRTSession

    config = directory.base if name == BASE else directory.draft
    file = directory.graph(name, ".engine")
    if config.opset < IN_PLACE_OPSET:
        raise EngineLoadError(f"{file}: opset is {config.opset}: only from {IN_PLACE_OPSET} on is KV written in place")
    return TensorRTSession(file, find_builder(config.builder or "auto"), stages, device)


def check_model(directory: EngineDirectory, model: Path) -> None:
    """Compare a checkpoint with the one that was exported; a folder without weights is taken as it is.

    Raises:
        EngineDirectoryError: it is another one.
    """
    try:
        found = checkpoint_fingerprint(model)
    except FileNotFoundError:
        return
    expected = directory.base.weights_fingerprint
    if found != expected:
        raise EngineDirectoryError(
            f"{directory.folder}: weights_fingerprint is {expected}, that of {model} is {found}: it was built of "
            "another checkpoint"
        )
