"""Images and audio of requests; imported by commands too, so that it imports what reads them where they are read."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.deployments.media.settings import ram_settings, settings

if TYPE_CHECKING:
    from prometheus_client import Metric

    from wingbeat.deployments.api.bodies.content_parts import PartReader
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.fleet.wire import WireRequest
    from wingbeat.deployments.media.opening import MediaRefused
    from wingbeat.deployments.media.reader import MediaReader
    from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
    from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
    from wingbeat.runtime.scheduling.request import Request
    from wingbeat.runtime.tokenizer import Tokenizer

__all__ = ["ram_settings", "settings"]


def content_parts(api: str) -> "Mapping[str, PartReader]":
    """Images and audio."""
    from wingbeat.deployments.media.content import READERS

    return READERS[api]


def prompt_reader(
    config: "AppConfig", takes: Mapping[str, str], folder: Path, tokenizer: "Tokenizer"
) -> "MediaReader | MediaRefused | None":
    """Reader of what a model takes."""
    from wingbeat.deployments.media.opening import media_reader
    from wingbeat.deployments.media.settings import limits_of

    return media_reader(takes, folder, limits_of(config), tokenizer)


def needs_torch(folder: Path) -> bool:
    """Whether a checkpoint has an encoder of images or audio, whose preparation needs torch."""
    from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

    return any(ConfigFile.read(folder).fields.get(name) for name in ("vision_config", "audio_config"))


def prompt_details(spans: "Sequence[PromptSpan]") -> dict[str, int]:
    """Tokens that stand for audio, if any do."""
    from wingbeat.runtime.media.media_input import AUDIO

    num_tokens = sum(one.length for one in spans if one.kind == AUDIO)
    return {"audio_tokens": num_tokens} if num_tokens else {}


def share_spans(sent: "WireRequest") -> "tuple[WireRequest, int]":
    """A request with its media in memory of their own; raises OSError where they find no room."""
    from wingbeat.deployments.media.shared import share_media

    try:
        return share_media(sent)
    except OSError as error:
        raise OSError(f"its media find no room in memory: {error}") from error


def attach_spans(sent: "WireRequest") -> "Request":
    """The inverse."""
    from wingbeat.deployments.media.shared import attach_media

    return attach_media(sent)


def families(snapshot: "FleetSnapshot") -> "Iterator[Metric]":
    """Encoders, and tokens that stand for media."""
    from wingbeat.deployments.media.families import media_families

    return media_families(snapshot)
