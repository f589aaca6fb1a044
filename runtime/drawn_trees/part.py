"""Draft trees whose shape a user has drawn."""

from typing import TYPE_CHECKING, Any

from wingbeat.runtime.refusals import Feature, Refusal

if TYPE_CHECKING:
    from wingbeat.runtime.drawn_trees.static_tree import StaticTree


def drawn_tree(given: Any) -> "StaticTree":
    """Tree of these paths. Raises ValueError for paths that are no tree."""
    from wingbeat.runtime.drawn_trees.static_tree import StaticTree

    return StaticTree.parse(given)


def refusals() -> tuple[Refusal, ...]:
    """Refusals of what drawn trees do not go with."""
    return (Refusal(Feature.DRAWN_TREE, Feature.TEXT_DRAFTER, "earlier text ranks no candidates", "give a number"),)
