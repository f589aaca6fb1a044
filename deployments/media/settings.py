"""Settings for images and audio in requests."""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from wingbeat.deployments.media.limits import MAX_HELD_MEDIA_BYTES, PER_REQUEST, MediaLimits
from wingbeat.deployments.options.panel_titles import FEATURES
from wingbeat.deployments.options.words import listed, object_of_json
from wingbeat.runtime.media.media_input import ARE

_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|[0-9a-f:]+")
_PANEL: dict[str, Any] = {"json_schema_extra": {"panel": FEATURES}}


def _check_domains(domains: tuple[str, ...] | None) -> tuple[str, ...] | None:
    lowered = None if domains is None else tuple(domain.lower() for domain in domains)
    bad = [domain for domain in lowered or () if not _DOMAIN.fullmatch(domain)]
    if bad:
        raise ValueError(f"{bad[0]!r}: must be a host name without scheme, port and path")
    return lowered


def _check_limits(limits: dict[str, int] | None) -> dict[str, int] | None:
    for kind, count in (limits or {}).items():
        if kind not in ARE and count:
            raise ValueError(f"{kind!r} is not served; only {' and '.join(map(repr, ARE))} are")
        if count < 0:
            raise ValueError(f"{kind!r} is {count}: use at least 0")
    return limits


def _of_json(value: Any) -> Any:
    return object_of_json(value, '{"image": 4}')


Domains = Annotated[tuple[str, ...] | None, BeforeValidator(listed), AfterValidator(_check_domains)]
Limits = Annotated[dict[str, int] | None, BeforeValidator(_of_json), AfterValidator(_check_limits)]
_DOMAINS = Field(
    None,
    description="Hosts, separated by commas, from which images and audio of requests may be fetched over http and "
    "https, redirects included. By default only data URLs are accepted. Needs the extra wingbeat[images] or "
    "wingbeat[audio].",
    **_PANEL,
)
_LIMITS = Field(
    None,
    description="Maximum number of images and of audio files in one request, as JSON; by default "
    f"{json.dumps(PER_REQUEST)}, and 0 accepts none. An image may have at most 25,000,000 pixels, audio may last at "
    "most 600 s, and each file may have at most 16 MiB.",
    **_PANEL,
)
_HELD = Field(
    MAX_HELD_MEDIA_BYTES,
    ge=1,
    description="Maximum bytes of decoded images and audio over all running requests of a router; further requests "
    "with images or audio get 503.",
    **_PANEL,
)
SETTINGS = {
    "allowed_media_domains": (Domains, _DOMAINS),
    "limit_mm_per_prompt": (Limits, _LIMITS),
    "max_media_memory_bytes": (int, _HELD),
}


def limits_of(config: Any) -> MediaLimits:
    """Builds a router's limits for images and audio from an `AppConfig`."""
    held = config.max_media_memory_bytes
    return MediaLimits(
        allowed_domains=frozenset(config.allowed_media_domains or ()),
        per_request=PER_REQUEST | (config.limit_mm_per_prompt or {}),
        max_bytes=min(MediaLimits.max_bytes, held),
        max_held_bytes=held,
    )
