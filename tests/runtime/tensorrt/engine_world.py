"""Engine directories of tiny pairs, and a session that runs the exported modules by torch: no export, same contract."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.runtime.models import random_head
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.llm import connect
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensorrt.backend import LoadedEngine, TensorRTBackend, engine_limits, load_engine
from wingbeat.runtime.tensorrt.base_graph import BaseGraph, as_graph
from wingbeat.runtime.tensorrt.block_drafter import BlockDrafter
from wingbeat.runtime.tensorrt.block_graph import BlockGraph
from wingbeat.runtime.tensorrt.build import head_fields
from wingbeat.runtime.tensorrt.draft_graph import DraftGraph
from wingbeat.runtime.tensorrt.engine_config import (
    BaseEngineConfig,
    DraftEngineConfig,
    EngineEncoder,
    EngineLayer,
    Limits,
)
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import base_shapes, block_mask_name, draft_shapes
from wingbeat.runtime.tensorrt.session import EngineError, EngineSession, EngineStage, TensorSpec, check_tensors
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

LIMITS = Limits(
    max_batch_size=4, max_input_len=64, max_kv_cache_capacity=256, max_verify_tree_size=16, max_draft_tree_size=16
)
OPS = GraphOps(18, torch.float32)
"""Torch runs these as they are."""
_COMMON = {
    "name": "tiny",
    "dtype": "float32",
    "opset": 18,
    "rope_config": {},
    "limits": LIMITS,
    "weights_fingerprint": "0" * 20,
    "files": {},
    "tools": {},
}


Extend = Callable[[LoadedEngine], object]
"""Adds to a verifier that a session runs."""


def as_it_is(loaded: LoadedEngine) -> None:
    """Adds nothing."""


class FakeDirectory:
    """The parts of an engine directory that the backend uses."""

    folder = Path("engines")

    def __init__(self, base: BaseEngineConfig, draft: DraftEngineConfig | None) -> None:
        self.base, self.draft = base, draft


class TorchSession:
    """An `EngineSession` over the module that would be exported.

    Args:
        run: the module's arguments by name -> its outputs in their order.
    """

    device = torch.device("cpu")

    def __init__(self, run, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec]) -> None:
        self._run = run
        self.inputs, self.outputs = inputs, outputs
        self.bound: dict[EngineStage, Mapping[str, Tensor]] = {}
        self.ran: list[EngineStage] = []
        self.dead: str | None = None
        """Message of the error that every later call raises."""

    def bind(self, stage: EngineStage, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(self, tensors)
        self.bound[stage] = tensors

    def keep_bound(self, stage: EngineStage) -> None:
        del self.bound[stage]

    def enqueue(self, stage: EngineStage) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)
        self.ran.append(stage)
        tensors = self.bound[stage]
        with torch.inference_mode():
            results = self._run({name: tensors[name] for name in self.inputs})
            for name, result in zip(self.outputs, results, strict=True):
                tensors[name].copy_(result)


def base_config(loaded: LoadedModel, tap_layers: tuple[int, ...], limits: Limits = LIMITS) -> BaseEngineConfig:
    """Configuration of an engine directory's verifier."""
    more = first_result("graph_room", loaded, limits)
    encoder = first_result("encoder_of", loaded)
    return BaseEngineConfig(
        **_COMMON | {"limits": limits},
        num_decoder_layers=len(loaded.layers),
        max_position_embeddings=loaded.max_position_embeddings,
        layers=tuple(EngineLayer(**vars(layer)) for layer in loaded.layers),
        rotary_dim=16,
        hidden_size=loaded.hidden_size,
        vocab_size=loaded.vocab_size,
        eos_token_ids=(),
        tap_layers=tap_layers,
        has_draft_model=bool(tap_layers),
        is_vlm=encoder is not None and encoder.mask is None,
        encoder=encoder,
        **({} if more is None else more.fields()),
    )


def draft_config(head: DecoderHead | OnePassHead, encoder: EngineEncoder | None = None) -> DraftEngineConfig:
    """Configuration of an engine directory's head.

    Args:
        encoder: of its verifier.
    """
    return DraftEngineConfig(**_COMMON | head_fields(head, encoder), base_fingerprint="0" * 20)


def base_session(loaded: LoadedModel, config: BaseEngineConfig) -> TorchSession:
    """The verifier's graph, run by torch."""
    sizes = (config.vocab_size, config.hidden_states_size, config.limits.capacity, torch.float32)
    shapes = base_shapes(loaded.layers, config.windows, *sizes, config.more_inputs, config.encoder, loaded.hidden_size)

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        with as_graph(loaded, OPS):
            graph = BaseGraph(loaded, config.tap_layers, OPS, config.more_inputs, config.encoder)
            try:
                return graph(*graph.arguments(list(tensors.values())))
            finally:
                graph.release()

    return TorchSession(run, *shapes)


def draft_session(head: DecoderHead | OnePassHead, config: DraftEngineConfig) -> TorchSession:
    """The head's graph, run by torch."""
    sizes = (config.draft_vocab_size, config.base_model_hidden_size, config.draft_model_hidden_size)
    names = () if config.block is None else [block_mask_name(*mask) for mask in config.block.distinct_masks]
    shapes = draft_shapes(config.layers, *sizes, config.limits.capacity, torch.float32, names, config.media)
    graph = DraftGraph(head, OPS, config.media) if config.block is None else BlockGraph(head, OPS)
    return TorchSession(lambda tensors: graph(*graph.arguments(list(tensors.values()))), *shapes)


def engine_on(
    session: EngineSession,
    config: BaseEngineConfig,
    limits: EngineConfig,
    drafter: Drafter | None,
    graph_device=None,
    extend: Extend = as_it_is,
) -> Engine:
    """An engine whose verifier a session runs, over its drafter in this thread."""
    directory = FakeDirectory(config, None)
    loaded, fixed = load_engine(config, limits, torch.device("cpu"))
    extend(loaded)
    backend = TensorRTBackend(directory, session, graph_device, fixed)
    needs = DrafterNeeds() if drafter is None else drafter.needs
    engine = Engine(loaded, engine_limits(limits, config), needs, backend=backend)
    if drafter is not None:
        connect(engine, drafter, InProcessChannel)
    return engine


def torch_pair(
    loaded: LoadedModel,
    speculation: SpeculationConfig,
    limits: EngineConfig,
    with_drafter: bool = True,
    head: DecoderHead | OnePassHead | None = None,
    built: Limits = LIMITS,
    extend: Extend = as_it_is,
) -> tuple[Engine, TorchSession, TorchSession | None]:
    """A whole engine on torch sessions, and the two sessions; the drafter's is None where there is none.

    Args:
        head: in the place of `random_head`.
        built: limits of the engines.
    """
    if not with_drafter:
        config = base_config(loaded, (), built)
        session = base_session(loaded, config)
        return engine_on(session, config, limits, None, extend=extend), session, None
    head = random_head(loaded) if head is None else head
    config = base_config(loaded, head.tap_layers, built)
    drafts = draft_config(head, config.encoder)
    session, draft = base_session(loaded, config), draft_session(head, drafts)
    if isinstance(head, OnePassHead):
        drafter = BlockDrafter(draft, drafts, head, speculation)
    else:
        drafter = EngineDrafter(draft, drafts, head.draft_token_ids, speculation)
    return engine_on(session, config, limits, drafter, extend=extend), session, draft
