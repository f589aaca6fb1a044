"""Makes recordings of live traffic according to a configuration: tapped layers, folder, share of the requests."""

import logging
import os
from typing import Any, NamedTuple

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.recordings.format import DTYPES, RecordingSpec
from wingbeat.runtime.recordings.live import LiveRecording
from wingbeat.runtime.recordings.live_writer import LiveWriter
from wingbeat.runtime.recordings.ring import RingWriter

logger = logging.getLogger(__name__)


class TrafficRecording(NamedTuple):
    """The recording of one engine."""

    rounds: LiveRecording
    """Observer of the engine's rounds."""
    writer: LiveWriter | RingWriter

    @classmethod
    def of(cls, writer: LiveWriter | RingWriter, share: float, spec: RecordingSpec) -> "TrafficRecording":
        """Return a recording of a share of the requests."""
        return cls(LiveRecording(writer, share, spec.taps_size, DTYPES[spec.taps_dtype]), writer)


def needs_with_recording(config: AppConfig, needs: DrafterNeeds, num_layers: int) -> DrafterNeeds:
    """Return a drafter's needs with tapped layers. These are the drafter's own tapped layers; if it taps none, the
    layers that a future head would tap.

    Raises:
        ValueError: a drafter with weights taps no hidden states, or taps other data in addition to hidden states.
    """
    if needs.tap_layers and not needs.kv_layers:
        return needs
    if needs.keeps_context:
        taps = "keys and values beside the hidden states" if needs.kv_layers else "no hidden states to record"
        raise ValueError(
            f"recording_dir is {str(config.recording_dir)!r}: the drafter {config.choice().label} taps {taps}; serve "
            "with an EAGLE head, 'ngram', 'suffix' or 'none'"
        )
    return needs._replace(tap_layers=default_tap_layers(num_layers))


def start_recording(config: AppConfig, engine: Any, engine_id: str) -> TrafficRecording:
    """Return a recording that can observe an engine; its files are created when the first data is recorded.

    Raises:
        ValueError: the engine is not Wingbeat's own, or the folder cannot be written to.
    """
    check_engine(engine, "recording_dir")
    root = config.recording_dir
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"recording_dir is {str(root)!r}: {error.strerror}") from error
    if not os.access(root, os.W_OK):
        raise ValueError(f"recording_dir is {str(root)!r}: it cannot be written to")
    spec = recording_spec(config, engine, config.recording_share)
    writer = LiveWriter(root / engine_id, root, spec, config.recording_max_bytes)
    logger.warning(
        "Live traffic is recorded: tokens and hidden states of %g %% of the requests go to %s",
        100 * config.recording_share,
        root,
    )
    return TrafficRecording.of(writer, config.recording_share, spec)


def check_engine(engine: Any, setting: str) -> None:
    """Raise ValueError if an engine does not expose its rounds. The message names `setting`, which needs rounds."""
    if not isinstance(engine, Engine):
        raise ValueError(f"{setting} needs Wingbeat's own engine: leave engine_factory out")


def recording_spec(config: AppConfig, engine: Engine, share: float) -> RecordingSpec:
    """Return the description of a recording of an engine's traffic."""
    loaded, tap_layers = engine.loaded, engine.needs.tap_layers
    return RecordingSpec(
        verifier=config.model_name(),
        fingerprint=checkpoint_fingerprint(config.model_dir()),
        tap_layers=tap_layers,
        hidden_size=loaded.hidden_size,
        num_layers=len(loaded.layers),
        vocab_size=loaded.vocab_size,
        taps_dtype="float16" if config.resolved_dtype() == "float16" else "bfloat16",
        top_k=0,
        logits_dtype=config.resolved_dtype(),
        settings={"source": "live", "share": share},
    )
