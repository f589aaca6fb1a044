"""Hooks of `/v1/embeddings`. The implementation is imported only when needed, because commands import this file."""

from typing import TYPE_CHECKING, Any

from wingbeat.deployments.embeddings.settings import embedding_kind_of, pooling_of

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

check_settings = "wingbeat.deployments.embeddings.settings:check_settings"
settings = "wingbeat.deployments.embeddings.settings:SETTINGS"

add_routes = "wingbeat.deployments.embeddings.routes:add_embedding_routes"
bodies = "wingbeat.deployments.embeddings.routes:BODIES"


def check_before_start(config: "AppConfig") -> None:
    """Raise ValueError if the model's folder specifies embeddings that are not supported."""
    pooling_of(config)


def surface(config: "AppConfig") -> dict[str, Any]:
    """Return the value that the endpoint needs: the kind of the model's embeddings."""
    return {"embeddings": embedding_kind_of(config)}
