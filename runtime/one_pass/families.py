"""Families of one-pass heads."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from wingbeat.runtime.head_families.families import family_told


class OnePassFamily(StrEnum):
    """Families whose heads draft all their tokens in one pass."""

    DFLASH = "DFlash"
    DFLASH2 = "DFlash2"
    DSPARK = "DSpark"
    JETSPEC = "JetSpec"
    PEAGLE = "P-EAGLE"


def one_pass_family(raw: Mapping[str, Any], names: Iterable[str]) -> OnePassFamily | None:
    """The family of a head that drafts in one pass and can be loaded; None for all other checkpoints.

    Raises:
        CheckpointError: a field that should be an object is not.
    """
    told = family_told(raw, names)
    return OnePassFamily(told) if told in tuple(OnePassFamily) else None
