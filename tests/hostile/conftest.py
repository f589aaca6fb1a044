"""Where hostile requests go, and the option that sends one of them again."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from .client import Address


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile-replay", metavar="SEED:INDEX", help="send one request of the fuzzer once more")


@pytest.fixture(scope="session")
def address(demo_app: Any) -> Address:
    """Where the demo pair's router listens."""
    if demo_app.own_url is None:
        pytest.skip("front_door is deleted: the router has no address of its own")
    url = urlsplit(demo_app.own_url)
    return Address(url.hostname, url.port, "")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The served model's."""
    from wingbeat.runtime.demo import demo_pair
    from wingbeat.runtime.tokenizer import Tokenizer

    return Tokenizer.load(demo_pair().verifier)
