"""A channel over a connection gives the guarantees of every kind of channel."""

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.channels import test_channel_contract
from tests.cluster.peers import SPEC, eventually, serve_in_thread
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel

globals().update({name: test for name, test in vars(test_channel_contract).items() if name.startswith("test_")})


class RemoteRig:
    """The drafter is another thread, at the other end of a connection over loopback."""

    def __init__(self) -> None:
        self.channel = RemoteChannel("127.0.0.1", SPEC)
        self.verifier = self.channel.verifier_end
        self.thread: threading.Thread | None = None

    def start(self, incarnation: int, mode: str) -> None:
        self.thread = serve_in_thread(RemoteChannel.attach(self.channel.name, incarnation), mode)
        assert self.verifier.incarnation == incarnation

    def close_witness(self) -> Callable[[], bool]:
        thread = self.thread
        return lambda: eventually(lambda: not thread.is_alive())


@pytest.fixture
def rig() -> Iterator[RemoteRig]:
    """A verifier's end, and drafters to start for it."""
    rig = RemoteRig()
    yield rig
    rig.verifier.close()
