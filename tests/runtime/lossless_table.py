"""The table of what a losslessness test varies: the model, what is drafted and how, the engine's room, its device."""

from tests.covering import pairwise
from tests.runtime.models import CHAIN, eagle_drafter
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_chain, right_tree
from tests.runtime.text_drafters import text_drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS

AXES = ("model", "kind", "shape", "room", "device")


def rows(models, rooms):
    """Values of `AXES` in which any two that may meet do meet."""
    kinds = ["right", "none", "random", "eagle", *TEXT_DRAFTERS[:1]]
    values = (list(models), kinds, ["chain", "tree"], list(rooms), ["host", "accelerator"])
    axes = dict(zip(AXES, values, strict=True))
    chosen = pairwise(axes, lambda row: row["shape"] == "tree" or row["kind"] != "random")
    return [tuple(row.values()) for row in chosen]


def drafter_of(kind, ref, speculation, sequences=None):
    """A drafter of one of the kinds; `sequences` are those a scripted one knows, the reference's where None."""
    if kind == "none":
        return None
    if kind == "eagle":
        return eagle_drafter(ref.loaded, speculation)
    if kind in TEXT_DRAFTERS:
        return text_drafter(kind, speculation)
    plan = random_tree if kind == "random" else right_chain if speculation is CHAIN else right_tree
    return ScriptedDrafter(sequences or ref.sequences, plan, ref.loaded.vocab_size)
