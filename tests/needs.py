"""Tests of other files that are about an optional feature as well."""

import pytest

from tests.optional import FEATURES, is_deleted


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where a feature is deleted."""
    return pytest.mark.skipif(is_deleted(FEATURES[name]), reason=f"{name} is deleted")
