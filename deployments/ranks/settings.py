"""The setting `tensor_parallel_size`."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import CLUSTER
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.tensor_parallel.group import PART_OF_GPU, RANKS, THREADS_TRIED

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
_DESCRIPTION = (
    "Number of ranks that each verifier's weights and KV heads are divided among. Ranks are processes of one node, "
    "each with num_gpus_per_verifier and num_cpus_per_verifier."
)
_FIELD = Field(1, ge=1, description=_DESCRIPTION, json_schema_extra={"panel": CLUSTER})
SETTINGS = {"tensor_parallel_size": (int, _FIELD)}


def asked(config: "AppConfig") -> dict[str, tuple[bool, str]]:
    """Return a pair for each feature: whether the settings use the feature, and a phrase that names the setting in
    error messages. The features are several ranks, and features that cannot be combined with several ranks.
    """
    size, share = config.tensor_parallel_size, config.num_gpus_per_verifier
    return {
        RANKS: (size > 1, f"tensor_parallel_size is {size}"),
        PART_OF_GPU: (0 < share < 1, f"num_gpus_per_verifier is {share:g}"),
        THREADS_TRIED: (config.threads == 0, "threads is 0"),
    }


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if the model's sizes cannot be divided evenly among the ranks; the message names the setting to
    change.
    """
    size, num_gpus = config.tensor_parallel_size, config.num_gpus_per_verifier
    if num_gpus > 1 and num_gpus == int(num_gpus):
        raise ValueError(
            f"num_gpus_per_verifier is {num_gpus:g}: one process runs on one GPU; use 1 and "
            f"tensor_parallel_size {int(num_gpus)}"
        )
    if size == 1:
        return
    from wingbeat.runtime.tensor_files import read_fields, text_fields
    from wingbeat.runtime.tensor_parallel.divisible import check_sizes

    folder = _checkpoint_here(config.model)
    if folder is not None:
        fields = read_fields(folder / "config.json")
        names = fields.get("architectures")
        name = names[0] if isinstance(names, list) and names else folder.resolve().name
        check_sizes(text_fields(fields), str(name), size)


def _checkpoint_here(model: Path | None) -> Path | None:
    """Return the verifier's folder if it is on this machine; None for a name on the hub, or if `model` is None and the
    demo pair is missing.
    """
    if model is not None:
        return None if HubName.parse(model) is not None else checkpoint_folder(model)
    try:
        return demo_pair().verifier
    except FileNotFoundError:
        return None
