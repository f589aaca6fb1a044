"""Settings of the images and the audio of requests."""

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
        raise ValueError(f"{bad[0]!r}: must be a host's name without scheme, port and path")
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
    description="Hosts that images and audio are fetched from over http and https, redirects included; none takes "
    "data URLs alone.",
    **_PANEL,
)
_LIMITS = Field(
    None,
    description=f"Images or audio of one request, such as {json.dumps(PER_REQUEST)}, which is the default; 0 takes "
    "none.",
    **_PANEL,
)
_HELD = Field(
    MAX_HELD_MEDIA_BYTES,
    ge=1,
    description="Of what is made of images and audio, over all requests of a router that have not ended; further "
    "ones with some get 503.",
    **_PANEL,
)
SETTINGS = {
    "allowed_media_domains": (Domains, _DOMAINS),
    "limit_mm_per_prompt": (Limits, _LIMITS),
    "max_media_memory_bytes": (int, _HELD),
}


def limits_of(config: Any) -> MediaLimits:
    """Limits of what images and audio of requests may ask of a router, by an `AppConfig`."""
    held = config.max_media_memory_bytes
    return MediaLimits(
        allowed_domains=frozenset(config.allowed_media_domains or ()),
        per_request=PER_REQUEST | (config.limit_mm_per_prompt or {}),
        max_bytes=min(MediaLimits.max_bytes, held),
        max_held_bytes=held,
    )
