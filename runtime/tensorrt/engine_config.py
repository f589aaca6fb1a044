"""What an engine directory says of itself: base_config.json and draft_config.json, validated field by field.

Names are Edge-LLM's where it has the field.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.parts import first, merged
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_json
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs

FORMAT_VERSION = 3

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class EngineDirectoryError(ValueError):
    """An engine directory cannot be used; one line that names the file and the field."""


class GraphConfig(BaseModel):
    """What both kinds of graphs have."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format_version: Literal[3] = FORMAT_VERSION
    name: str
    """Of the checkpoint."""
    dtype: Literal["float32", "float16", "bfloat16"]
    """Of weights, activations and KV."""
    opset: int
    rope_config: dict[str, Any]
    num_decoder_layers: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    limits: Limits
    weights_fingerprint: str
    """Of the checkpoint that was exported."""
    files: dict[str, str]
    """SHA-256 of what the graph needs, by file name."""
    tools: dict[str, str]
    """Versions of what made the files."""
    builder: str | None = None
    """What built the .engine file; None where there is the ONNX file alone."""
    compute_capabilities: tuple[str, ...] = ()
    """Of the GPUs that the .engine file is for."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return getattr(torch, self.dtype)


class EngineLayer(BaseModel):
    """One layer's attention."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    key_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    sliding_window: int | None = Field(None, ge=0)

    def attention(self) -> LayerAttention:
        """As the engine's bookkeeping has it."""
        return LayerAttention(**self.model_dump())


class EngineInterpolation(BaseModel):
    """How an encoder makes embeddings of positions of a grid of a table of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_grid_per_side: int = Field(ge=1)
    mode: str
    align_corners: bool


class EngineVisual(BaseModel):
    """The vision encoder, and what its images do to the verifier's graph."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pixels: tuple[int, ...]
    """Of an image, or of a patch of one that has a grid of its own."""
    num_axes: int = Field(0, ge=0, le=3)
    """By which rows are rotated, 3 where images have rows and columns; 0 where there is but one."""
    num_deep: int = Field(0, ge=0)
    """Layers whose results get features added (DeepStack)."""
    num_tokens: int = Field(0, ge=0)
    """Of an image without a grid of its own."""
    merge: int = Field(0, ge=0)
    """Rows and columns of patches that a token is made of, where images have grids; else 0."""
    window_size: int | None = None
    patch_size: int = 0
    interpolation: EngineInterpolation | None = None

    @property
    def num_taps(self) -> int:
        """Embeddings that one of a grid is made of."""
        return 16 if self.interpolation is not None and self.interpolation.mode == "bicubic" else 4


class DraftMedia(NamedTuple):
    """What a head's graph takes of images beside their tokens; nothing."""

    num_axes: int = 0
    """By which pairs are rotated, 3 where images have rows and columns that the head knows; 0 where it knows one."""
    width: int = 0
    """Of the embeddings of images, which it reads in the place of their tokens' own; 0 reads the tokens' own."""


PartConfig = create_model(
    "PartConfig",
    __base__=GraphConfig,
    **merged("graph_fields"),
)
"""Fields of the parts that are there."""


class BaseEngineConfig(PartConfig):
    """base_config.json: the verifier."""

    layers: tuple[EngineLayer, ...]
    rotary_dim: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    eos_token_ids: tuple[int, ...]
    tap_layers: tuple[int, ...]
    """Layers whose input is an output of the graph, ascending; the number of layers stands for the final norm's."""
    has_draft_model: bool
    is_vlm: bool = False
    visual: EngineVisual | None = None
    """Where `is_vlm`."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if len(self.layers) != self.num_decoder_layers:
            raise ValueError(f"layers has {len(self.layers)} entries: num_decoder_layers is {self.num_decoder_layers}")
        if not all(0 <= layer <= self.num_decoder_layers for layer in self.tap_layers):
            raise ValueError(f"tap_layers is {self.tap_layers}: there are {self.num_decoder_layers} layers")
        if self.is_vlm != (self.visual is not None):
            raise ValueError(f"is_vlm is {self.is_vlm}, and visual is {'' if self.visual else 'not '}there")
        return self

    @property
    def more_inputs(self) -> MoreInputs | None:
        """Inputs of the graph that a part has added; None where there are none."""
        return first("graph_inputs", self)

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows over the layers; 0 stands for none."""
        return tuple(sorted({layer.sliding_window or 0 for layer in self.layers}))

    @property
    def hidden_states_size(self) -> int:
        """Width of the output `hidden_states`; 0 where there is none."""
        return len(self.tap_layers) * self.hidden_size


class EngineBlock(BaseModel):
    """What a head drafts in one pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: str
    """What a slot predicts, by the name of `Slots`."""
    size: int = Field(ge=2)
    """Slots, the last decided token's included."""
    first_slot: int = Field(ge=0)
    """That predicts something."""
    vocab_size: int = Field(ge=1)
    """Of the target."""
    masks: tuple[LayerMask, ...]
    """By layer."""

    @property
    def num_drafted(self) -> int:
        """Tokens that it predicts."""
        return self.size - self.first_slot

    @property
    def distinct_masks(self) -> tuple[LayerMask, ...]:
        """Each once, in the order of the layers."""
        return tuple(dict.fromkeys(self.masks))


class DraftEngineConfig(GraphConfig):
    """draft_config.json: the head."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    """Of a head's values, where `head_dim` is of its queries and keys."""
    rotary_dim: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    base_model_hidden_size: int = Field(ge=1)
    """Width of the input `hidden_states_input`."""
    draft_model_hidden_size: int = Field(ge=1)
    tap_layers: tuple[int, ...]
    base_fingerprint: str
    """`weights_fingerprint` of the verifier it was exported for."""
    block: EngineBlock | None = None
    """Of a head that drafts a block in one pass; None of an EAGLE head."""
    num_axes: int = Field(0, ge=0, le=3)
    """As `DraftMedia`."""
    media_width: int = Field(0, ge=0)
    """As `DraftMedia.width`."""

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        if self.block is not None and (self.num_axes or self.media_width):
            raise ValueError(f"num_axes is {self.num_axes} and media_width {self.media_width}: a block has neither")
        return self

    @property
    def media(self) -> DraftMedia:
        """What the graph takes of images."""
        return DraftMedia(self.num_axes, self.media_width)

    @property
    def layers(self) -> list[LayerAttention]:
        """Of its KV."""
        layer = LayerAttention(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim, None)
        return [layer] * self.num_decoder_layers


def read_engine_config(file: Path, kind: type[ConfigT]) -> ConfigT:
    """A config of an engine directory.

    Raises:
        EngineDirectoryError: it is not there, or a field is missing, unknown or wrong; names file and field.
    """
    try:
        return kind(**read_json(file))
    except ModelCheckpointError as error:
        raise EngineDirectoryError(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "fields"
        problem = first["msg"].removeprefix("Value error, ")
        raise EngineDirectoryError(f"{file}: {field}: {problem[:1].lower()}{problem[1:]}") from error
