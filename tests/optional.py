"""What belongs to each optional feature, which is deleted with it: source, tests, documents and data.

This table is the one place that says it; `python -m tests.without NAME` deletes by it. The source finds a feature by
its line in `deployments/parts.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[1]
Value = TypeVar("Value")


class Feature(NamedTuple):
    """An optional feature."""

    paths: tuple[str, ...]
    """Files and folders below the root, as globs."""
    needs: tuple[str, ...] = ()
    """Features that it cannot be without: it is deleted with any of them."""
    endpoint: str | None = None
    """Path of HTTP that it serves, with all below; cases that send something there are deleted with it."""


FEATURES = {
    "doctor": Feature(
        (
            *("deployments/doctor", "tests/deployments/doctor"),
            *("benchmarks/gpu/doctor.py", "tests/e2e/test_gpu_first.py"),
        )
    ),
    "page": Feature(
        ("deployments/page", "tests/deployments/page", "tests/e2e/test_page*.py", "tests/e2e/page_driver.py")
    ),
    "responses": Feature(
        (
            *("deployments/api/responses_api", "tests/deployments/api/test_responses_api.py"),
            "tests/clients/test_responses_client.py",
        ),
        endpoint="/v1/responses",
    ),
    "messages": Feature(
        (
            *("deployments/api/messages_api", "tests/deployments/api/test_messages_api.py"),
            "tests/clients/test_anthropic_client.py",
        ),
        endpoint="/v1/messages",
    ),
}


def without(names: set[str]) -> set[str]:
    """These features, and all that need one of them."""
    more = {name for name, feature in FEATURES.items() if names & set(feature.needs)} - names
    return without(names | more) if more else names


def endpoints_gone(root: Path = ROOT) -> set[str]:
    """Endpoints of features that are deleted."""
    return {one.endpoint for one in FEATURES.values() if one.endpoint and not any(root.glob(one.paths[0]))}


def served(by_path: Mapping[str, Value]) -> dict[str, Value]:
    """What is sent to each path, without those of endpoints that are deleted."""
    gone = tuple(endpoints_gone())
    return {path: sent for path, sent in by_path.items() if not (gone and path.startswith(gone))}
