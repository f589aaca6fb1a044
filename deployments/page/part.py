"""`GET /` among the routes; imported by commands too, so that it imports what it adds where it adds it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.served_models import ServedModels


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Serve the page; it opens on a chat where the first model has a chat template."""
    from wingbeat.deployments.page.playground import add_page

    add_page(app, models.pools, models.first.tokenizer.chat_template is not None)
