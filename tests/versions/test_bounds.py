"""Versions that pyproject.toml allows are tested: each dependency has a lower bound, which pip is given."""

import pytest
from packaging.requirements import Requirement

from tests.versions.bounds import dependencies, lower_bound, lowest, pins


def test_every_dependency_has_one_lower_bound():
    assert all(lower_bound(requirement) for requirement in dependencies())


def test_the_lowest_is_the_bound_and_a_pin_is_the_pin():
    required = [Requirement("ray[serve]>=2.60,<3"), Requirement("torch>=2.11,<2.14"), Requirement("numpy>=2")]
    assert lowest(required, {"torch": "2.13.0"}) == ["ray[serve]==2.60", "torch==2.13.0", "numpy==2"]


@pytest.mark.parametrize("text", ["numpy", "numpy<3", "numpy==2.1"])
def test_a_dependency_without_a_lower_bound_is_refused(text: str):
    with pytest.raises(ValueError, match="must have one lower bound"):
        lower_bound(Requirement(text))


def test_the_pins_are_allowed():
    allowed = {requirement.name: requirement.specifier for requirement in dependencies()}
    assert all(version in allowed[name] for name, version in pins().items())
