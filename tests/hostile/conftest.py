"""The application that hostile requests go to: the demo pair with a key."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from .client import Address
from .contract import KEY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile-replay", metavar="SEED:INDEX", help="send one request of the fuzzer once more")


@pytest.fixture(scope="session")
def hostile_app(start_app: Callable[..., Any]) -> Iterator[Any]:
    """The demo pair behind a key. Trees are fixed: measured costs of a busy machine may switch speculation off."""
    with start_app("hostile", api_key=KEY, adaptive=False) as app:
        yield app


@pytest.fixture(scope="session")
def address(hostile_app: Any, ray_cluster: str) -> Address:
    """Where it listens."""
    url = urlsplit(ray_cluster)
    return Address(url.hostname, url.port, "/hostile")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The served model's."""
    from wingbeat.runtime.demo import demo_pair
    from wingbeat.runtime.tokenizer import Tokenizer

    return Tokenizer.load(demo_pair().verifier)
