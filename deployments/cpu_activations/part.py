"""The setting `cpu_activations`."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from wingbeat.deployments.options.panel_titles import MODEL
from wingbeat.runtime.refusals import Feature, Refusal

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.options.model_options import ModelOptions

INT8_ACTIVATIONS = "`cpu_activations` `int8`"
RANKS = "`tensor_parallel_size` above 1"
"""Feature of the part `ranks`, under the same name."""
refusals = (
    Refusal(INT8_ACTIVATIONS, Feature.CUDA, "the CPU's kernels alone round them", "use device cpu"),
    Refusal(INT8_ACTIVATIONS, Feature.ENGINE_DIR, "its engines round none"),
    Refusal(INT8_ACTIVATIONS, RANKS, "ranks hold no packed weights"),
)
_DESCRIPTION = (
    "On CPUs, inputs of linear layers with packed weights: 'int8' rounds them to eight bits in blocks of 32, as "
    "llama.cpp does, which is faster and changes texts, equally with and without speculation; 'exact' does not round "
    "them."
)
_FIELD = Field("exact", description=_DESCRIPTION, json_schema_extra={"panel": MODEL})
model_settings = {"cpu_activations": (Literal["exact", "int8"], _FIELD)}


def model_asked(config: "ModelOptions") -> dict[str, tuple[bool, str]]:
    """Whether activations are rounded, and the words that say so."""
    return {INT8_ACTIVATIONS: (config.cpu_activations == "int8", "cpu_activations is int8")}


def text_identity(config: "AppConfig") -> str:
    """Words on the rounding of activations; empty if there is none."""
    return ", activations rounded to int8" if config.cpu_activations == "int8" else ""
