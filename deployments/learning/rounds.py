"""Records rounds of live traffic for the learner."""

from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import learning_root
from wingbeat.deployments.recordings.live_recording import TrafficRecording, check_engine, recording_spec
from wingbeat.runtime.recordings.ring import RingWriter, RoundRing


def record_rounds(config: AppConfig, engine: Any) -> TrafficRecording:
    """Return a recording that can observe an engine; its files are created when the first round is recorded.

    Raises:
        ValueError: the engine is not Wingbeat's own.
    """
    check_engine(engine, "learn")
    options = config.learn
    spec = recording_spec(config, engine, options.share)
    writer = RingWriter(RoundRing(learning_root(config) / "rounds", options.max_bytes, options.expire_s), spec)
    return TrafficRecording.of(writer, options.share, spec)
