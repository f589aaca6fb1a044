"""The setting `suffix_beside`, and metrics of the draft trees that continue earlier text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from wingbeat.deployments.options.panel_titles import DRAFTING
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.refusals import Feature, Refusal

if TYPE_CHECKING:
    from prometheus_client import Metric

    from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
    from wingbeat.deployments.options.model_options import ModelOptions

SUFFIX_BESIDE = "`suffix_beside`"
refusals = (
    Refusal(SUFFIX_BESIDE, Feature.TEXT_DRAFTER, "it continues earlier text already"),
    Refusal(SUFFIX_BESIDE, Feature.NO_DRAFTER, "there is nothing beside it", "use drafter suffix"),
    Refusal(SUFFIX_BESIDE, Feature.ENGINE_DIR, "its engines are built for their drafter's trees"),
)
_DESCRIPTION = (
    "Beside a drafter with weights: draft by continuing earlier text, of the request or of other requests' outputs, "
    "if more tokens are expected from that than from a draft. For requests that quote: edits of files, tool results. "
    "By default on for smollm2 on a CPU, else off."
)
model_settings = {
    "suffix_beside": (bool | None, Field(None, description=_DESCRIPTION, json_schema_extra={"panel": DRAFTING}))
}


def model_asked(config: "ModelOptions") -> dict[str, tuple[bool, str]]:
    """Return a pair for each of two features, suffix drafts in addition to a drafter and the absence of a drafter:
    whether the settings use the feature, and a phrase that names the setting in error messages.
    """
    none = config.choice().drafts
    return {
        SUFFIX_BESIDE: (bool(config.suffix_beside), "suffix_beside is True"),
        Feature.NO_DRAFTER: (not none, f"drafter is {config.choice().label}"),
    }


def model_limits(config: "ModelOptions") -> dict[str, bool]:
    """Return the setting's value for the engine; by default on if measurements showed that the model gains by it."""
    if config.suffix_beside is not None:
        return {"suffix_beside": config.suffix_beside}
    used, _ = config.asked().get(Feature.ENGINE_DIR, (False, ""))
    is_own = config.drafter == "auto" and config.resolved_device() == "cpu" and not used
    return {"suffix_beside": is_own and bool(first_result("gains_by_suffix", config.model))}


def families(snapshot: "FleetSnapshot") -> "Iterator[Metric]":
    """Yield counters of rounds whose draft tree continued earlier text."""
    from wingbeat.deployments.metrics.families import counter
    from wingbeat.deployments.metrics.rows import LABELS, rows

    texts = {
        "rounds": "Rounds of sequences with a draft tree that continued earlier text",
        "draft_tokens": "Nodes of such trees verified",
        "accepted_tokens": "Nodes of such trees accepted",
    }
    for index, (name, text) in enumerate(texts.items()):
        found = rows(snapshot, lambda figures, at=index: figures["by_text"][at])
        yield counter(f"wingbeat_text_{name}", f"{text}, beside a drafter.", LABELS, found)
