"""Hooks of recordings. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.recordings.live_recording import TrafficRecording
    from wingbeat.runtime.drafters.base import DrafterNeeds
    from wingbeat.runtime.recordings.extract_config import ExtractConfig

check_before_start = "wingbeat.deployments.recordings.settings:check_before_start"
check_settings = "wingbeat.deployments.recordings.settings:check_settings"
settings = "wingbeat.deployments.recordings.settings:SETTINGS"

families = "wingbeat.deployments.recordings.families:recording_families"


def add_commands(app: "typer.Typer") -> None:
    """Add `wingbeat extract`, which parses its arguments when it runs."""
    from wingbeat.deployments.cli.late_commands import add_late_command

    def extract(config: "ExtractConfig") -> None:
        """Record a verifier's tokens, hidden states and top logits over a text, for training a drafter."""
        from wingbeat.deployments.recordings.extract_command import extract_command

        extract_command(config)

    add_late_command(app, "extract", "wingbeat.runtime.recordings.extract_config:ExtractConfig", extract)


def tapped(config: "AppConfig", needs: "DrafterNeeds", num_layers: int) -> "DrafterNeeds | None":
    """Return the needs with hidden states tapped for a recording; None without a recording."""
    if config.recording_dir is None:
        return None
    from wingbeat.deployments.recordings.live_recording import needs_with_recording

    return needs_with_recording(config, needs, num_layers)


def observe(config: "AppConfig", engine: Any, engine_id: str) -> "TrafficRecording | None":
    """Return a recording of a share of the requests; None if the settings ask for no recording."""
    if config.recording_dir is None:
        return None
    from wingbeat.deployments.recordings.live_recording import start_recording

    return start_recording(config, engine, engine_id)
