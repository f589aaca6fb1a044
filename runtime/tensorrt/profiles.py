"""Optimization profiles: the shapes of every stage, one profile each."""

from collections.abc import Mapping
from typing import NamedTuple

from wingbeat.runtime.tensorrt.engine_config import Limits
from wingbeat.runtime.tensorrt.export import BATCH, ROWS, SELECTED
from wingbeat.runtime.tensorrt.session import BASE_STAGES, DRAFT_STAGES, EngineStage

_TYPICAL_BATCH = 8


class SizeRange(NamedTuple):
    """Least, typical and largest of a free dimension."""

    least: int
    typical: int
    largest: int


Profile = dict[str, SizeRange]
"""By the free dimension's name."""


def base_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """The verifier's stages."""
    tree = limits.max_verify_tree_size
    largest = max(limits.max_input_len, tree)
    rows = {
        EngineStage.PREFILL: (_up_to(largest), SizeRange(1, 1, largest)),
        EngineStage.VERIFY: (_up_to(tree), _up_to(tree)),
        EngineStage.PLAIN: (_just(1), _just(1)),
    }
    return _profiles(BASE_STAGES, rows, limits)


def draft_profiles(limits: Limits) -> dict[EngineStage, Profile]:
    """The drafter's stages."""
    tree, path = limits.max_draft_tree_size, limits.max_verify_tree_size
    rows = {
        EngineStage.PREFILL: (_up_to(limits.max_input_len), _just(1)),
        EngineStage.PROPOSAL: (_up_to(tree), _up_to(tree)),
        EngineStage.ACCEPT: (_up_to(path), _just(1)),
    }
    return _profiles(DRAFT_STAGES, rows, limits)


def input_shapes(
    profile: Profile, shapes: Mapping[str, tuple[int | str, ...]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Least, typical and largest shape of each input.

    Args:
        shapes: of the graph's inputs; a free dimension stands by its name.
    """
    return {
        name: tuple(tuple(profile[dim][which] if isinstance(dim, str) else dim for dim in shape) for which in range(3))
        for name, shape in shapes.items()
    }


def _profiles(
    stages: tuple[EngineStage, ...], rows: dict[EngineStage, tuple[SizeRange, SizeRange]], limits: Limits
) -> dict[EngineStage, Profile]:
    most = limits.max_batch_size
    batch = SizeRange(1, min(_TYPICAL_BATCH, most), most)
    return {stage: {BATCH: batch, ROWS: rows[stage][0], SELECTED: rows[stage][1]} for stage in stages}


def _up_to(largest: int) -> SizeRange:
    return SizeRange(1, largest, largest)


def _just(size: int) -> SizeRange:
    return SizeRange(size, size, size)
