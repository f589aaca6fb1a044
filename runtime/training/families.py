"""The families of heads that can be trained, by the names that users pass."""

from wingbeat.kernels.parts import load_function
from wingbeat.runtime.parts import merged
from wingbeat.runtime.training.family import Family
from wingbeat.runtime.training.unrolled_families import Eagle1Family, Eagle3Family

FAMILIES: dict[str, Family] = {
    "eagle3": Eagle3Family(),
    "eagle3.1": Eagle3Family(newer=True),
    "eagle1": Eagle1Family(),
    **{name: load_function(path)() for name, path in merged("trained_families").items()},
}
"""Families by the value of `TrainDrafterConfig.family`."""
