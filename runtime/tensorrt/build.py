"""Builds an engine directory from the checkpoints of a verifier and a head: exports the graphs, writes the configs,
builds the engines.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.tensor_files import read_fields
from wingbeat.runtime.tensorrt import engine_directory as layout
from wingbeat.runtime.tensorrt.builders import EngineBuilder
from wingbeat.runtime.tensorrt.draft_graph import media_of
from wingbeat.runtime.tensorrt.engine_config import (
    BaseEngineConfig,
    DraftEngineConfig,
    EngineBlock,
    EngineEncoder,
    EngineLayer,
    GraphConfig,
    Limits,
)
from wingbeat.runtime.tensorrt.export import export_base, export_draft
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import Profile, base_profiles, draft_profiles
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs
from wingbeat.runtime.tensorrt.session import EngineStage
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Callback that receives a description of each step as it starts."""


class BuildPlan(NamedTuple):
    """Inputs of a build."""

    model: Path
    drafter: Path | None
    """Folder of an EAGLE or one-pass head; None builds no draft engine."""
    out: Path
    dtype: torch.dtype
    limits: Limits
    opset: int = 24
    """ONNX opset; see `GraphOps`."""


def num_steps(plan: BuildPlan, builds_engines: bool) -> int:
    """Number of steps that a build reports: one for loading, and for each graph one for its export and, if
    `builds_engines`, one for the build of its engine.
    """
    fields = read_fields(plan.model / "config.json")
    takes_media = bool(hooks("encoder_of")) and not fields.keys().isdisjoint(("vision_config", "audio_config"))
    num_graphs = 1 + (plan.drafter is not None) + takes_media
    return 1 + num_graphs * (2 if builds_engines else 1)


def export_directory(plan: BuildPlan, progress: Progress = logger.info) -> layout.EngineDirectory:
    """Write an engine directory with ONNX files.

    Raises:
        ValueError: a checkpoint, or a feature that a checkpoint needs, is not supported.
        ExportError: torch or onnx cannot export a graph.
    """
    if plan.drafter is not None and (kind := kind_of(plan.drafter, plan.model)) not in ("eagle", "one_pass"):
        raise ValueError(
            f"drafter {plan.drafter} is of kind {kind}: engines can be built from EAGLE and one-pass heads"
        )
    if (plan.out / "config.json").is_file() and not (plan.out / layout.BASE_CONFIG).is_file():
        raise ValueError(f"out is {plan.out}, which is a checkpoint folder: choose another folder for the engines")
    plan.out.mkdir(parents=True, exist_ok=True)
    layout.clear(plan.out)
    progress("loading the verifier")
    loaded = load_model(plan.model, plan.dtype, torch.device("cpu"), packed=False)
    head = None if plan.drafter is None else _load_head(plan, loaded)
    ops = GraphOps(plan.opset, plan.dtype)
    tap_layers = () if head is None else head.tap_layers
    progress("exporting the verifier")
    more = first_result("graph_room", loaded, plan.limits)
    encoder = first_result("encoder_of", loaded)
    export_base(loaded, tap_layers, plan.limits, ops, plan.out / f"{layout.BASE}.onnx", more, encoder)
    if encoder is not None:
        progress(f"exporting the {encoder.graph} encoder")
        first_result("export_encoder", loaded, encoder, plan.limits, ops, plan.out / f"{encoder.graph}.onnx")
    base = _base_config(plan, loaded, tap_layers, more, encoder)
    if head is not None:
        progress("exporting the drafter")
        export_draft(head, plan.limits, ops, plan.out / f"{layout.DRAFT}.onnx", media_of(head, encoder))
        layout.write_draft_to_target(plan.out, head.draft_token_ids)
        common = _common(plan, layout.DRAFT, plan.drafter) | head_fields(head, base.encoder)
        layout.write_config(plan.out, DraftEngineConfig(**common, base_fingerprint=base.weights_fingerprint))
    layout.copy_tokenizer(plan.model, plan.out)
    layout.write_config(plan.out, base)
    return layout.EngineDirectory(plan.out)


def build_engines(
    directory: layout.EngineDirectory,
    builder: EngineBuilder,
    compute_capabilities: tuple[str, ...] = (),
    progress: Progress = logger.info,
) -> layout.EngineDirectory:
    """Build an engine from each ONNX file of a directory, and write the engine to the same directory.

    Raises:
        BuildError: the builder cannot build a graph.
    """
    folder = directory.folder
    parts: list[tuple[str, GraphConfig, Any]] = [(layout.BASE, directory.base, base_profiles)]
    if directory.draft is not None:
        parts.append((layout.DRAFT, directory.draft, draft_profiles))

    def build(name: str, profiles: dict[EngineStage, Profile]) -> None:
        progress(f"building {name}.engine by {builder}")
        onnx_file, engine_file = directory.graph(name, ".onnx"), folder / f"{name}.engine"
        builder.build(onnx_file, profiles, engine_file, compute_capabilities, folder / layout.TIMING_CACHE)

    encoder = directory.base.encoder
    if encoder is not None and (sizes := first_result("encoder_profiles", directory.base.limits)):
        build(encoder.graph, sizes)
    for name, config, profiles in parts:
        build(name, profiles(config.limits))
        layout.write_config(
            folder,
            config.model_copy(
                update={
                    "builder": builder.name,
                    "compute_capabilities": compute_capabilities,
                    "tools": config.tools | {builder.name: builder.version},
                    "files": _digests(folder, name),
                }
            ),
        )
    return layout.EngineDirectory(folder)


def _load_head(plan: BuildPlan, loaded: LoadedModel) -> DecoderHead | OnePassHead:
    target = TargetDescription.from_checkpoint(plan.model)
    choice = first_result("choose_convention", plan.drafter, target, loaded, Tokenizer.find(plan.model))
    if kind_of(plan.drafter, plan.model) == "one_pass":
        head = _one_pass_head(plan, target)
    else:
        head = load_eagle_head(plan.drafter, target, plan.dtype)
    head = head if choice is None else head.with_convention(choice.best.convention)
    return head.eval().requires_grad_(False)


def _one_pass_head(plan: BuildPlan, target: TargetDescription) -> OnePassHead:
    checkpoint = read_one_pass_checkpoint(plan.drafter)
    if checkpoint.family is OnePassFamily.PEAGLE:
        raise ValueError(
            f"drafter {plan.drafter} is a P-EAGLE head: engines can be built from the other one-pass heads"
        )
    head = load_one_pass_head(checkpoint, target, plan.dtype, "cpu")
    if head.config.block_size > plan.limits.max_draft_tree_size:
        raise ValueError(
            f"drafter {plan.drafter} drafts blocks of {head.config.block_size}: max_draft_tree_size is "
            f"{plan.limits.max_draft_tree_size}"
        )
    return head


def _base_config(
    plan: BuildPlan,
    loaded: LoadedModel,
    tap_layers: tuple[int, ...],
    more: MoreInputs | None,
    encoder: EngineEncoder | None,
) -> BaseEngineConfig:
    config = loaded.model.config.get_text_config()
    rope = dict(getattr(config, "rope_parameters", None) or {})
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return BaseEngineConfig(
        **_common(plan, layout.BASE, plan.model),
        rope_config=rope,
        num_decoder_layers=len(loaded.layers),
        max_position_embeddings=loaded.max_position_embeddings,
        layers=tuple(EngineLayer(**vars(layer)) for layer in loaded.layers),
        rotary_dim=max(int(dim * float(rope.get("partial_rotary_factor", 1.0))), 1),
        hidden_size=loaded.hidden_size,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        tap_layers=tap_layers,
        has_draft_model=plan.drafter is not None,
        is_vlm=encoder is not None and encoder.graph == layout.VISUAL,
        encoder=encoder,
        **({} if more is None else more.fields()),
    )


def head_fields(head: DecoderHead | OnePassHead, encoder: EngineEncoder | None = None) -> dict[str, Any]:
    """Fields of draft_config.json that describe a head.

    Args:
        head: the head.
        encoder: encoder of its verifier; None if the verifier takes no media.
    """
    config, in_one_pass, media = head.config, isinstance(head, OnePassHead), media_of(head, encoder)
    block = None
    if in_one_pass:
        slots = {"slots": str(config.slots), "size": config.block_size, "first_slot": config.first_slot}
        block = EngineBlock(**slots, vocab_size=config.vocab_size, masks=config.masks)
    return {
        "rope_config": dict(config.rope_parameters),
        "num_decoder_layers": config.num_layers if in_one_pass else head.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "value_dim": config.head_dim if in_one_pass else head.value_dim,
        "rotary_dim": getattr(config, "rope_dim", None) or config.rotary_dim or config.head_dim,
        "draft_vocab_size": config.draft_vocab_size,
        "base_model_hidden_size": head.taps_size,
        "draft_model_hidden_size": config.hidden_size,
        "tap_layers": head.tap_layers,
        "block": block,
        "num_axes": media.num_axes,
        "media_width": media.width,
    }


def _common(plan: BuildPlan, name: str, checkpoint: Path) -> dict[str, Any]:
    import onnx

    return {
        "name": checkpoint.resolve().name,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "opset": plan.opset,
        "limits": plan.limits,
        "weights_fingerprint": checkpoint_fingerprint(checkpoint),
        "files": _digests(plan.out, name),
        "tools": {"torch": torch.__version__, "transformers": transformers.__version__, "onnx": onnx.__version__},
    }


def _digests(folder: Path, name: str) -> dict[str, str]:
    """Digests of a graph's files and of the files that are used with the graph: the encoder's files for the
    verifier, the map of draft ids for the drafter.
    """
    graphs = [name] if name == layout.DRAFT else [name, layout.VISUAL, layout.AUDIO]
    names = sorted(one for graph in graphs for one in layout.graph_files(folder, graph))
    names += [layout.DRAFT_TO_TARGET] * (name == layout.DRAFT)
    return {one: layout.file_digest(folder / one) for one in names}
