"""An application's start without Ray: its engine and its drafter, loaded in this process."""

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.build import build_setup, needs_loaded_here
from wingbeat.deployments.replica.engine.engine_setup import DrafterStartError, DrafterTerms
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.runtime.drafters.base import DrafterNeeds


def build_in_process(config: AppConfig) -> None:
    """Load both.

    Raises:
        ValueError, OSError: the line that the engine's process would end its start with.
    """
    if config.engine_factory is not None:
        load_factory(config.engine_factory)

    def needs(terms: DrafterTerms) -> DrafterNeeds:
        return needs_loaded_here(config, terms.convention) if config.has_drafter() else DrafterNeeds()

    try:
        build_setup(config, needs)
    except DrafterStartError as error:
        raise ValueError(str(error)) from None
