"""A router's objects for one model: the pool of its engines, its tokenizer and its figures."""

import logging
from collections.abc import Awaitable
from typing import Any

from ray.serve.handle import DeploymentHandle

from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.serve_engines import ServeEngines
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.deployments.parts import first_result, hooks, merged
from wingbeat.runtime import parts as runtime_parts
from wingbeat.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ModelFront:
    """A router's objects for one model.

    Args:
        config: settings of this model, which are an item of `AppConfig.served()`.
        engines: Serve handle of the model's verifiers.
        router_id: id of the router's replica.
    """

    def __init__(self, config: AppConfig, engines: DeploymentHandle, router_id: str) -> None:
        self.config = config
        self._folder = config.model_dir(with_weights=False)
        self.needs_torch = any(needs_torch(self._folder) for needs_torch in hooks("needs_torch"))
        """Whether preparing this model's requests needs torch."""
        self.source = ServeEngines(engines, config.text_identity())
        self.pool = EnginePool(
            self.source,
            max_num_seqs=config.most_num_seqs(),
            max_queued_requests=config.max_queued_requests,
            engine_wait_s=config.engine_wait_s,
            may_sleep=config.may_sleep(),
            grace_s=config.shutdown_timeout_s,
        )
        self.own = first_result("router_figures", router_id, lambda: self.pool.num_admitted)
        """The router's own figures of this model; None if no part measures them."""
        self.figures = FleetFigures(config.model_name(), lambda: self.pool.engine_ids, self._stats, self.own)

    async def start(self) -> None:
        """Reads the tokenizer and waits for the first engine."""
        self._tokenizer = Tokenizer.load(self._folder, self.config.own_template())
        self._reader = first_result("chat_reader", self.config, self._tokenizer.chat_template)
        if self._reader is not None:
            described = self._reader.describe()
            logger.info("%s.", described[:1].upper() + described[1:])
        await self.pool.start()

    def new_service(self, beside: CompletionService | None = None) -> CompletionService:
        """Makes the service that answers requests; must be called after `start`.

        `beside` is the service of another model of this router, or None.
        """
        config = self.config
        return CompletionService(
            self.pool,
            self._tokenizer,
            self._reader,
            self.own,
            first_result("prompt_reader", config, self.pool.info.takes, self._folder, self._tokenizer),
            config.max_answer_bytes,
            takes_templates=config.chat_template == OF_REQUESTS and bool(runtime_parts.hooks("render_apart")),
            aliases=config.model_names()[1:],
            beside=beside,
            of_parts=merged("surface", config),
        )

    def _stats(self, engine_id: str, report: dict[str, Any] | None) -> Awaitable[dict[str, Any]]:
        return self.source.call(engine_id, "stats", report=report)
