"""The configs of an engine directory: base_config.json and draft_config.json, validated field by field.

A field that also exists in TensorRT Edge-LLM's configs has the same name as there.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.parts import first_result, merged
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_json
from wingbeat.runtime.tensorrt.limits import Limits
from wingbeat.runtime.tensorrt.more_inputs import MoreInputs

FORMAT_VERSION = 4

BASE, DRAFT, VISUAL, AUDIO = "eagle_base", "eagle_draft", "visual", "audio"
"""Names of the graphs of an engine directory."""
ConfigT = TypeVar("ConfigT", bound=BaseModel)


class EngineDirectoryError(ValueError):
    """An engine directory cannot be used; the message is one line that names the file and the field."""


class GraphConfig(BaseModel):
    """Fields that the configs of both graphs have."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format_version: Literal[4] = FORMAT_VERSION
    name: str
    """Name of the checkpoint."""
    dtype: Literal["float32", "float16", "bfloat16"]
    """Dtype of weights, activations and KV."""
    opset: int
    rope_config: dict[str, Any]
    num_decoder_layers: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    limits: Limits
    weights_fingerprint: str
    """Fingerprint of the exported checkpoint."""
    files: dict[str, str]
    """SHA-256 of each file that the graph needs, by file name."""
    tools: dict[str, str]
    """Versions of the tools that made the files."""
    builder: str | None = None
    """Library that built the .engine file; None if there is only the ONNX file."""
    compute_capabilities: tuple[str, ...] = ()
    """Compute capabilities of the GPUs that can run the .engine file."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of weights, activations and KV."""
        return getattr(torch, self.dtype)


class EngineLayer(BaseModel):
    """Attention shape of one layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    key_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    sliding_window: int | None = Field(None, ge=0)

    def attention(self) -> LayerAttention:
        """The layer as the runtime's `LayerAttention`."""
        return LayerAttention(**self.model_dump())


class EngineInterpolation(BaseModel):
    """How an encoder interpolates the position embeddings of an image grid from a table of position embeddings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_grid_per_side: int = Field(ge=1)
    mode: str
    align_corners: bool


class EngineEncoder(BaseModel):
    """The vision or audio encoder, and its inputs to the verifier's graph."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[int, ...]
    """Shape of the encoder's main input: of a whole image if all images have one size, of one patch if images are grids
    of patches, or of a window's spectrogram [mel bins, frames].
    """
    mask: str | None = None
    """Name of the audio encoder's input that marks the frames that are no padding; None for a vision encoder."""
    num_axes: int = Field(0, ge=0, le=3)
    """Number of RoPE axes: 3 (time, row, column) if image rows and columns have their own positions, else 0."""
    num_deep: int = Field(0, ge=0)
    """Number of first layers to whose outputs image features are added (DeepStack)."""
    num_tokens: int = Field(0, ge=0)
    """Number of tokens of an image or window if all have one size; 0 if images are grids of patches."""
    merge: int = Field(0, ge=0)
    """Side length, in patches, of the square that is merged into one token; 0 if images are not grids of patches."""
    window_size: int | None = None
    """Size, in pixels, of the windows within which patches attend to each other; None if there are no windows."""
    patch_size: int = 0
    interpolation: EngineInterpolation | None = None

    @property
    def graph(self) -> str:
        """Name of the encoder's graph in an engine directory."""
        return VISUAL if self.mask is None else AUDIO

    @property
    def num_taps(self) -> int:
        """Number of table entries from which an interpolated position embedding is computed."""
        return 16 if self.interpolation is not None and self.interpolation.mode == "bicubic" else 4


class DraftMedia(NamedTuple):
    """Media inputs of a draft head's graph; by default none."""

    num_axes: int = 0
    """Number of position axes of each draft pair: 3 (time, image row, image column) with M-RoPE; 0 if each pair has a
    single position.
    """
    width: int = 0
    """Width of the media embeddings that the head reads in place of token embeddings; 0 if it reads no media
    embeddings.
    """


PartConfig = create_model(
    "PartConfig",
    __base__=GraphConfig,
    **merged("graph_fields"),
)
"""`GraphConfig` with the fields of the installed runtime parts."""


class BaseEngineConfig(PartConfig):
    """Config of the verifier's graph (base_config.json)."""

    layers: tuple[EngineLayer, ...]
    rotary_dim: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    eos_token_ids: tuple[int, ...]
    tap_layers: tuple[int, ...]
    """Layers whose inputs the graph outputs, ascending; num_decoder_layers stands for the final norm's output."""
    has_draft_model: bool
    is_vlm: bool = False
    encoder: EngineEncoder | None = None
    """Encoder of the media that the verifier takes; a vision encoder if and only if `is_vlm` is true."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if len(self.layers) != self.num_decoder_layers:
            raise ValueError(f"layers has {len(self.layers)} entries: num_decoder_layers is {self.num_decoder_layers}")
        if not all(0 <= layer <= self.num_decoder_layers for layer in self.tap_layers):
            raise ValueError(f"tap_layers is {self.tap_layers}: there are {self.num_decoder_layers} layers")
        graph = None if self.encoder is None else self.encoder.graph
        if self.is_vlm != (graph == VISUAL):
            raise ValueError(f"is_vlm is {self.is_vlm}, and the encoder is {graph}")
        return self

    @property
    def more_inputs(self) -> MoreInputs | None:
        """Optional graph inputs of a runtime part; None if there are none."""
        return first_result("graph_inputs", self)

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows of the layers in tokens; 0 stands for layers without a window."""
        return tuple(sorted({layer.sliding_window or 0 for layer in self.layers}))

    @property
    def hidden_states_size(self) -> int:
        """Width of the output `hidden_states`; 0 if there is no such output."""
        return len(self.tap_layers) * self.hidden_size


class EngineBlock(BaseModel):
    """Block of a head that drafts in one pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: str
    """Name of the `Slots` member that defines which position a slot predicts."""
    size: int = Field(ge=2)
    """Number of slots, including the last committed token's."""
    first_slot: int = Field(ge=0)
    """First slot that predicts a token."""
    vocab_size: int = Field(ge=1)
    """Vocabulary size of the target."""
    masks: tuple[LayerMask, ...]
    """Mask of each layer."""

    @property
    def num_drafted(self) -> int:
        """Number of tokens that the block predicts."""
        return self.size - self.first_slot

    @property
    def distinct_masks(self) -> tuple[LayerMask, ...]:
        """The distinct masks, in layer order."""
        return tuple(dict.fromkeys(self.masks))


class DraftEngineConfig(GraphConfig):
    """Config of the draft head's graph (draft_config.json)."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    """Width of an attention head's values; `head_dim` is the width of its queries and keys."""
    rotary_dim: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    base_model_hidden_size: int = Field(ge=1)
    """Width of the input `hidden_states_input`."""
    draft_model_hidden_size: int = Field(ge=1)
    tap_layers: tuple[int, ...]
    base_fingerprint: str
    """`weights_fingerprint` of the verifier that the head was exported for."""
    block: EngineBlock | None = None
    """Set for a head that drafts a block in one pass; None for an EAGLE head."""
    num_axes: int = Field(0, ge=0, le=3)
    """See `DraftMedia`."""
    media_width: int = Field(0, ge=0)
    """See `DraftMedia.width`."""

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        if self.block is not None and (self.num_axes or self.media_width):
            raise ValueError(f"num_axes is {self.num_axes} and media_width {self.media_width}: a block has neither")
        return self

    @property
    def media(self) -> DraftMedia:
        """Media inputs of the graph."""
        return DraftMedia(self.num_axes, self.media_width)

    @property
    def layers(self) -> list[LayerAttention]:
        """Attention shape of each layer, for the KV."""
        layer = LayerAttention(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim, None)
        return [layer] * self.num_decoder_layers


def read_engine_config(file: Path, kind: type[ConfigT]) -> ConfigT:
    """Read a config of an engine directory.

    Raises:
        EngineDirectoryError: the file is missing, or a field is missing, unknown or invalid; the message names file and
            field.
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
