"""A server with the demo pair for clients of other people, and the tools they are given."""

from collections.abc import Iterator

import pytest

from tests.deployments.tool_world import named_parsers
from tests.e2e.page_server import serving

MODEL = "wingbeat-demo"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """URL of a server that parses tool calls but no reasoning, which the demo model would open and never end."""
    with serving(parsers=named_parsers("hermes", None)) as found:
        yield found
