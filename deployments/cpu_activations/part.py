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
"""Name of a feature that the part for ranks defines."""
refusals = (
    Refusal(INT8_ACTIVATIONS, Feature.CUDA, "only the CPU's kernels round them", "use device cpu"),
    Refusal(INT8_ACTIVATIONS, Feature.ENGINE_DIR, "its engines do not round them"),
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
    """Return a pair for the feature `INT8_ACTIVATIONS`: whether the settings turn the rounding of activations on, and a
    phrase that names the setting in error messages.
    """
    return {INT8_ACTIVATIONS: (config.cpu_activations == "int8", "cpu_activations is int8")}


def text_identity(config: "AppConfig") -> str:
    """Return the phrase about activations for `AppConfig.text_identity`; empty if activations are not rounded."""
    return ", activations rounded to int8" if config.cpu_activations == "int8" else ""
