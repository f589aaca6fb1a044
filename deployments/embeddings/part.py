"""`/v1/embeddings` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

from typing import TYPE_CHECKING, Any

from wingbeat.deployments.embeddings.settings import embedding_kind_of, pooling_of

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

check_settings = "wingbeat.deployments.embeddings.settings:check_settings"
settings = "wingbeat.deployments.embeddings.settings:SETTINGS"

add_routes = "wingbeat.deployments.embeddings.routes:add_embedding_routes"
bodies = "wingbeat.deployments.embeddings.routes:BODIES"


def check_before_start(config: "AppConfig") -> None:
    """Raises ValueError where the model's folder asks for embeddings that are not served."""
    pooling_of(config)


def surface(config: "AppConfig") -> dict[str, Any]:
    """Which embeddings the model has."""
    return {"embeddings": embedding_kind_of(config)}
