"""What an operator can set about the images and the audio of requests."""

import re
from typing import Any

from pydantic import Field, field_validator

from wingbeat.deployments.limits import MAX_AUDIOS, MAX_HELD_MEDIA_BYTES, MAX_IMAGES
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import listed, object_of_json
from wingbeat.runtime.scheduling.media import ARE, AUDIO, IMAGE

_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|[0-9a-f:]+")


class MediaOptions(ModelOptions):
    """The part of `AppConfig` that says which media are taken."""

    allowed_media_domains: tuple[str, ...] | None = Field(
        None,
        description="Hosts that images and audio are fetched from over http and https, redirects included; none takes "
        "data URLs alone.",
    )
    limit_mm_per_prompt: dict[str, int] | None = Field(
        None,
        description=f'Images or audio of one request, such as {{"image": {MAX_IMAGES}, "audio": {MAX_AUDIOS}}}, which '
        "is the default; 0 takes none.",
    )
    max_media_memory_bytes: int = Field(
        MAX_HELD_MEDIA_BYTES,
        ge=1,
        description="Of what is made of images and audio, over all requests of a router that have not ended; further "
        "ones with some get 503.",
    )

    @field_validator("allowed_media_domains", mode="before")
    @classmethod
    def _domains_by_commas(cls, value: Any) -> Any:
        return listed(value)

    @field_validator("allowed_media_domains")
    @classmethod
    def _check_domains(cls, domains: tuple[str, ...] | None) -> tuple[str, ...] | None:
        lowered = None if domains is None else tuple(domain.lower() for domain in domains)
        bad = [domain for domain in lowered or () if not _DOMAIN.fullmatch(domain)]
        if bad:
            raise ValueError(f"{bad[0]!r}: must be a host's name without scheme, port and path")
        return lowered

    @field_validator("limit_mm_per_prompt", mode="before")
    @classmethod
    def _limits_from_text(cls, value: Any) -> Any:
        return object_of_json(value, '{"image": 4}')

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _check_limits(cls, limits: dict[str, int] | None) -> dict[str, int] | None:
        for kind, count in (limits or {}).items():
            if kind not in ARE and count:
                raise ValueError(f"{kind!r} is not served; only {' and '.join(map(repr, ARE))} are")
            if count < 0:
                raise ValueError(f"{kind!r} is {count}: use at least 0")
        return limits

    def media_per_request(self) -> dict[str, int]:
        """Most of one request, by kind."""
        return {IMAGE: MAX_IMAGES, AUDIO: MAX_AUDIOS} | (self.limit_mm_per_prompt or {})
