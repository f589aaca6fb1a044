"""An engine's process that waits for its replica."""

import os

import pytest
import torch

from wingbeat.cluster.channels.link import Link
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.engine_messages import ToEngine
from wingbeat.deployments.replica.engine.engine_process import _build, _expect


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


def test_an_engine_flushes_denormal_numbers(monkeypatch):
    """Attention weights of unlikely keys are denormal, with which CPUs compute many times as slowly."""
    monkeypatch.setattr(
        "wingbeat.deployments.replica.engine.build.build_setup", lambda *_: float(torch.tensor([1e-39]) * 1)
    )
    threads = torch.get_num_threads()
    try:
        assert _build(AppConfig(), None, None) == 0.0
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
