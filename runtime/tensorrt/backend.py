"""The backend `tensorrt`, which runs the verifier's TensorRT engine; the verifier's weights are not loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import block_bytes
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.refusals import Feature, refuse
from wingbeat.runtime.tensorrt.base_runner import BaseRunner
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig
from wingbeat.runtime.tensorrt.engine_directory import BASE, EngineDirectory
from wingbeat.runtime.tensorrt.engine_model import EngineModel, LinearRows
from wingbeat.runtime.tensorrt.linear_kv import NO_PAGES, LinearKV, Pages, RowCache
from wingbeat.runtime.tensorrt.session import EngineSession
from wingbeat.runtime.tensorrt.stage_runner import FIRST_ROW
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


@dataclass
class LoadedEngine(LoadedModel):
    """A verifier that runs as an engine: its properties come from the engine directory's config, and no weights are
    loaded.
    """

    config: BaseEngineConfig | None = None
    on: torch.device | None = None

    @classmethod
    def of(cls, config: BaseEngineConfig, device: torch.device) -> "LoadedEngine":
        """Build from the config of an engine directory."""
        return cls(
            model=None,
            name=config.name,
            layers=[layer.attention() for layer in config.layers],
            decoder_layers=nn.ModuleList(),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=min(config.max_position_embeddings, config.limits.max_kv_cache_capacity),
            eos_token_ids=frozenset(config.eos_token_ids),
            config=config,
            on=device,
        )

    @property
    def device(self) -> torch.device:
        return self.on

    @property
    def dtype(self) -> torch.dtype:
        return self.config.torch_dtype

    @property
    def description(self) -> str:
        return self.config.model_dump_json()

    @property
    def computed_by(self) -> str:
        """See `LoadedModel.computed_by`; returns the digests of the engine's files."""
        return " ".join(["engine", *self.config.files.values()])

    @property
    def own_features(self) -> tuple[LinearRows, ...]:
        """See `LoadedModel.own_features`."""
        return (LinearRows(),)


class TensorRTBackend(Backend):
    """Runs a verifier's engine.

    Args:
        directory: the engine directory.
        session: session of the graph `eagle_base`.
        graph_device: captures CUDA graphs of verification and of plain decoding; None runs them eagerly.
        fixed: tensors at fixed addresses for the graph's optional inputs.
    """

    on_host = False

    def __init__(
        self,
        directory: EngineDirectory,
        session: EngineSession,
        graph_device: GraphDevice | None = None,
        fixed: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.directory = directory
        self.session = session
        self.graph_device = graph_device
        self.fixed = fixed

    def parts(
        self, loaded: LoadedEngine, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[EngineModel, RowCache]:
        """See `Backend.parts`."""
        base, blocks = self.directory.base, Pages(config.num_kv_blocks, config.block_size)
        kv = LinearKV(
            loaded.layers,
            config.max_num_seqs + FIRST_ROW,
            base.limits.capacity,
            loaded.dtype,
            loaded.device,
            blocks if config.enable_prefix_caching else NO_PAGES,
        )
        cache = RowCache(kv, blocks, block_bytes(loaded.layers, config.block_size, loaded.dtype))
        runner = BaseRunner(self.session, base, kv, self.graph_device, self.fixed)
        model = EngineModel(runner, cache, tap_layers, kv_layers, self.directory.folder)
        if self.graph_device is not None:
            runner.capture(config.speculation.num_nodes if model.taps_size else None)
        return model, cache


class OpenedEngine(NamedTuple):
    """An opened verifier on this backend."""

    loaded: LoadedEngine
    limits: EngineConfig
    backend: TensorRTBackend


def open_backend(folder: Path, model: Path, limits: EngineConfig, device: torch.device) -> OpenedEngine:
    """Open the verifier of an engine directory.

    Args:
        folder: the engine directory.
        model: the served checkpoint; if it has weights, they must be those that the engine was exported from.
        limits: the requested limits.
        device: device to run on.

    Raises:
        EngineDirectoryError: a file is missing or differs from the recorded one.
        EngineLoadError: no installed library can run the engine on this device.
        ValueError: a requested limit exceeds the engine's.
    """
    directory = EngineDirectory(folder)
    directory.check_files(BASE)
    directory.check_model(model)
    limits = engine_limits(limits, directory.base)
    session = directory.open_session(BASE, device)
    graphs = CudaGraphDevice(device) if device.type == "cuda" else None
    loaded, fixed = load_engine(directory.base, limits, device)
    for extend in hooks("extend_engine"):
        extend(directory, loaded, device)
    return OpenedEngine(loaded, limits, TensorRTBackend(directory, session, graphs, fixed))


def load_engine(
    config: BaseEngineConfig, limits: EngineConfig, device: torch.device
) -> tuple[LoadedEngine, Mapping[str, Tensor]]:
    """The verifier that a config describes, and tensors at fixed addresses for the graph's optional inputs."""
    loaded, more = LoadedEngine.of(config, device), config.more_inputs
    return loaded, {} if more is None else more.bind(loaded, limits)


def engine_limits(config: EngineConfig, engine: BaseEngineConfig) -> EngineConfig:
    """Adjusts the requested limits to those of the engine, and sets the size and number of KV blocks.

    Without prefix caching each sequence has a single block, which has as many positions as a row of the engine's KV.

    Raises:
        ValueError: a requested limit exceeds the engine's, or a setting is not supported; the message names the limit
            or the setting.
    """
    limits = engine.limits
    if config.lower_max_model_len:
        longest = min(config.max_model_len, limits.max_kv_cache_capacity, engine.max_position_embeddings)
        config = replace(config, max_model_len=longest)
    for name, value, field, most in (
        ("max_model_len", config.max_model_len, "max_kv_cache_capacity", limits.max_kv_cache_capacity),
        ("verify_tree_size", config.speculation.num_nodes, "max_verify_tree_size", limits.max_verify_tree_size),
        *(row for rows in hooks("beyond_graph") for row in rows(config, limits)),
    ):
        if value > most:
            raise ValueError(
                f"{name} is {value}: the engine was built with {field} {most}; lower it or rebuild the engine"
            )
    refuse(config.asked() | {Feature.ENGINE_DIR: "engine_dir is given"})
    size, num_blocks = config.block_size, config.num_kv_blocks
    if not config.enable_prefix_caching:
        size, num_blocks = limits.capacity, config.max_num_seqs + 1
    elif num_blocks is None:
        num_blocks = config.max_num_seqs * config.max_blocks_per_seq + 1
    return replace(
        config,
        max_num_batched_tokens=min(config.max_num_batched_tokens, limits.max_input_len),
        block_size=size,
        num_kv_blocks=num_blocks,
        lower_max_model_len=False,
        cuda_graphs=False,
    )
