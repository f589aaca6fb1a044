"""The models behind one endpoint: a request's `model` chooses one."""

from collections.abc import Iterator

from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import invalid, shown, unknown_model
from wingbeat.deployments.fleet.engine_pool import EnginePool


class ServedModels:
    """Services of one or more models, the first one first; names are those of one of them alone."""

    def __init__(self, *services: CompletionService) -> None:
        self._services = services

    @classmethod
    def of(cls, served: "CompletionService | ServedModels") -> "ServedModels":
        """The models, or those of one service that is alone."""
        return served if isinstance(served, ServedModels) else cls(served)

    def __iter__(self) -> Iterator[CompletionService]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    @property
    def first(self) -> CompletionService:
        """Whose threads read all bodies."""
        return self._services[0]

    @property
    def pools(self) -> list[EnginePool]:
        """By model."""
        return [service.pool for service in self._services]

    def names(self) -> list[str]:
        """Names that a request may give as `model`, variants not counted."""
        return [name for service in self._services for name in service.prompts.names]

    def choose(self, model: str | None) -> CompletionService:
        """The service of a model, or of one of its variants. Where one model is served, no name is needed.

        Raises:
            ApiError: 404, there is no such model; 400, several models are served and none is named.
        """
        if len(self._services) == 1:
            self.first.check_model(model)
            return self.first
        if model is None:
            raise invalid("model", f"must be given, as this server has several: {', '.join(map(shown, self.names()))}")
        for service in self._services:
            if service.prompts.knows(model):
                return service
        raise unknown_model(model, ", ".join(self.names()))
