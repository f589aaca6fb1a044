"""An engine's process that waits for its replica."""

import os

import pytest

from wingbeat.cluster.channels.link import Link
from wingbeat.deployments.replica.engine.engine_messages import ToEngine
from wingbeat.deployments.replica.engine.engine_process import _expect


def test_a_word_that_does_not_come_ends_the_wait():
    replica = Link.create(4096)
    engine = Link(*map(os.dup, replica.child_fds), is_parent=False)
    replica.send((ToEngine.SUBMIT, "client", []))  # not what is waited for
    with pytest.raises(RuntimeError, match="the replica has not sent 'needs' within 0 s"):
        _expect(engine, ToEngine.NEEDS, 0.2)
    replica.send((ToEngine.NEEDS, b"needs", None))
    assert _expect(engine, ToEngine.NEEDS, 10.0) == [b"needs", None]
    replica.close()
    engine.close()
