"""`/v1/embeddings` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.embeddings.settings import check_settings, embedding_kind_of, pooling_of, settings

if TYPE_CHECKING:
    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.app_config import AppConfig

__all__ = ["check_settings", "settings"]

add_routes = "wingbeat.deployments.embeddings.routes:add_embedding_routes"


def check_before_start(config: "AppConfig") -> None:
    """Raises ValueError where the model's folder asks for embeddings that are not served."""
    pooling_of(config)


def surface(config: "AppConfig") -> dict[str, Any]:
    """Which embeddings the model has."""
    return {"embeddings": embedding_kind_of(config)}


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The endpoint's body, by its path."""
    from wingbeat.deployments.embeddings.body import EmbeddingsBody
    from wingbeat.deployments.embeddings.routes import EMBEDDINGS_PATH

    return {EMBEDDINGS_PATH: EmbeddingsBody}
