"""What belongs to each optional feature, which is deleted with it: source, tests, documents and data.

This table is the one place that says it; `python -m tests.without NAME` deletes by it. The source finds a feature by
its line in `deployments/parts.py`.
"""

from typing import NamedTuple


class Feature(NamedTuple):
    """An optional feature."""

    paths: tuple[str, ...]
    """Files and folders below the root, as globs."""
    needs: tuple[str, ...] = ()
    """Features that it cannot be without: it is deleted with any of them."""


FEATURES = {
    "doctor": Feature(
        ("deployments/doctor", "tests/deployments/doctor", "benchmarks/gpu/doctor.py", "tests/e2e/test_gpu_first.py")
    ),
    "page": Feature(
        ("deployments/page", "tests/deployments/page", "tests/e2e/test_page*.py", "tests/e2e/page_driver.py")
    ),
}


def without(names: set[str]) -> set[str]:
    """These features, and all that need one of them."""
    more = {name for name, feature in FEATURES.items() if names & set(feature.needs)} - names
    return without(names | more) if more else names
