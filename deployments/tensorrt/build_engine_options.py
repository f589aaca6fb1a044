"""Options of `wingbeat build-engine`; does not import torch."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from wingbeat.deployments.options.model_options import ModelFolder
from wingbeat.runtime.config import dtype_name
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.tensor_files import read_headers, stored_dtype, weight_files
from wingbeat.runtime.tensorrt.limits import Limits, PartLimits

if TYPE_CHECKING:
    from wingbeat.runtime.tensorrt.build import BuildPlan

_LIMITS = Limits()
ENGINE_DTYPES = ("float16", "bfloat16")


class BuildEngineConfig(PartLimits, ModelFolder):
    """Options of `wingbeat build-engine`."""

    drafter: str = Field(
        "auto",
        description="Folder, or name on the hub, of an EAGLE head; 'none' builds no draft engine, 'auto' is the "
        "demo pair's head for the demo model and 'none' for any other.",
    )
    out: Path = Field(description="The engine directory, made or written over.")
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        "auto",
        description="Of weights, activations and KV; 'auto' is the checkpoint's own. float32 is for ONNX Runtime.",
    )
    opset: Literal["24", "23", "18"] = Field("24", description="Of the ONNX files; lower ones are for older builders.")
    onnx_only: bool = Field(False, description="Export, and build no engine; what a CPU runs.")
    builder: Literal["auto", "tensorrt", "tensorrt-rtx"] = Field(
        "auto", description="What builds the engines; 'auto' is TensorRT where it is installed, TensorRT-RTX else."
    )
    compute_capability: tuple[str, ...] = Field(
        (), description="GPUs that TensorRT-RTX builds for, such as 8.9,12.0; by default this machine's."
    )
    max_batch: int = Field(_LIMITS.max_batch_size, ge=1, description="Sequences of one pass.")
    max_input_len: int = Field(_LIMITS.max_input_len, ge=1, description="Prompt tokens of one pass and sequence.")
    max_kv: int = Field(_LIMITS.max_kv_cache_capacity, ge=1, description="Tokens of the longest sequence.")
    max_verify_tree: int = Field(
        _LIMITS.max_verify_tree_size,
        ge=2,
        description="Most tree nodes verified per sequence and round, root included.",
    )
    max_draft_tree: int = Field(
        _LIMITS.max_draft_tree_size, ge=1, description="Most tree nodes that a draft grows from: (steps - 1) * top_k."
    )
    max_image_tokens: int = Field(
        _LIMITS.max_image_tokens,
        ge=1,
        description="Tokens of the largest image, where a model takes several sizes.",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_torchs_name(cls, value: str) -> str:
        return dtype_name(value)

    @model_validator(mode="after")
    def _check_engines(self) -> "BuildEngineConfig":
        if self.dtype == "float32" and not self.onnx_only:
            raise ValueError("dtype is float32: engines are built in float16 or bfloat16; give one, or onnx_only")
        return self

    def limits(self) -> Limits:
        """Return the maximum shapes for which the engines are built."""
        return Limits(
            max_batch_size=self.max_batch,
            max_input_len=self.max_input_len,
            max_kv_cache_capacity=self.max_kv,
            max_verify_tree_size=self.max_verify_tree,
            max_draft_tree_size=self.max_draft_tree,
            max_image_tokens=self.max_image_tokens,
            **{name: getattr(self, name) for name in PartLimits.model_fields},
        )

    def plan(self) -> "BuildPlan":
        """Return the plan of the build.

        Raises:
            ValueError: the drafter is not a head's folder.
        """
        import torch  # imported here, because importing torch takes seconds, for which a command's help should not wait

        from wingbeat.runtime.tensorrt.build import BuildPlan

        drafter = None
        if self.drafter != "none" and not (self.drafter == "auto" and self.model is not None):
            choice = parse_drafter(self.drafter, self.model)
            if not isinstance(choice.source, Path):
                raise ValueError(f"drafter is {self.drafter!r}: engines are built of EAGLE heads, or give 'none'")
            drafter = choice.source
        dtype = getattr(torch, self._dtype())
        return BuildPlan(self.model_dir(), drafter, self.out, dtype, self.limits(), int(self.opset))

    def _dtype(self) -> str:
        stored = weights_dtype(self.model_dir())
        if self.dtype != "auto":
            return self.dtype
        if stored not in ENGINE_DTYPES and not self.onnx_only:
            raise ValueError(
                f"dtype is auto and {self.model_dir()} is in {stored}: engines are built in float16 or bfloat16, which "
                "round its text; give one, or onnx_only"
            )
        return stored if stored in ENGINE_DTYPES else "float32"


def weights_dtype(folder: Path) -> str:
    """Return torch's name of the dtype of the weights: the dtype in config.json, else the dtype of most of the weights,
    else float32.

    Raises:
        ModelCheckpointError: a file cannot be read.
    """
    stored = stored_dtype(folder)
    if stored is not None:
        return stored
    numbers: Counter[str] = Counter()
    for header in read_headers(weight_files(folder)).values():
        numbers[header.dtype] += prod(header.shape)
    names = {"F16": "float16", "BF16": "bfloat16"}
    return names.get(numbers.most_common(1)[0][0], "float32") if numbers else "float32"
