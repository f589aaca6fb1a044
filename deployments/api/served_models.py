"""The models behind one endpoint, chosen by a request's `model`."""

from collections.abc import Iterator

from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import invalid, shown, unknown_model
from wingbeat.deployments.fleet.engine_pool import EnginePool


class ServedModels:
    """Completion services of one or more models, in a fixed order; no two models share a name."""

    def __init__(self, *services: CompletionService) -> None:
        self._services = services

    @classmethod
    def of(cls, served: "CompletionService | ServedModels") -> "ServedModels":
        """Returns `served`; a single service is wrapped in a `ServedModels`."""
        return served if isinstance(served, ServedModels) else cls(served)

    def __iter__(self) -> Iterator[CompletionService]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    @property
    def first(self) -> CompletionService:
        """The first model's service, whose threads parse the bodies of requests to all models."""
        return self._services[0]

    @property
    def pools(self) -> list[EnginePool]:
        """Engine pools, in the order of the models."""
        return [service.pool for service in self._services]

    def names(self) -> list[str]:
        """Names that a request may pass as `model`, without variants."""
        return [name for service in self._services for name in service.prompts.names]

    def choose(self, model: str | None) -> CompletionService:
        """Returns the service of the model or variant named `model`. The name is optional if only one model is served.

        Raises:
            ApiError: 404, there is no such model; 400, several models are served and `model` is None.
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
