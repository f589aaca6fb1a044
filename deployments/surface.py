"""What the HTTP surface is built from, made of settings, which lie below it and know none of it."""

from wingbeat.deployments.api.access import Access
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.media.limits import MediaLimits
from wingbeat.runtime.scheduling.media import AUDIO, IMAGE


def access_of(config: AppConfig, bound_host: str | None) -> Access:
    """Who may use the HTTP surface of a server bound to `bound_host`."""
    return Access.of_server(
        bound_host,
        api_keys=config.api_key,
        operator_keys=config.operator_key,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
    )


def media_limits_of(config: AppConfig) -> MediaLimits:
    """How much the images and the audio of requests may ask of a router."""
    held, most = config.max_media_memory_bytes, config.media_per_request()
    return MediaLimits(
        allowed_domains=frozenset(config.allowed_media_domains or ()),
        max_images=most[IMAGE],
        max_audios=most[AUDIO],
        max_bytes=min(MediaLimits.max_bytes, held),
        max_held_bytes=held,
    )
