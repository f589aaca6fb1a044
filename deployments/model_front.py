"""What a router has of one model: its engines, tokenizer and parsers, and what it measures of them."""

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.named_adapters import NamedAdapters
from wingbeat.deployments.fleet.serve_engines import ServeEngines
from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.options.live_options import LiveOptions
from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.deployments.parts import first, hooks
from wingbeat.deployments.surface import parsers_of
from wingbeat.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ModelFront:
    """One model's part of a router.

    Args:
        config: of this model, one of `AppConfig.served`.
    """

    def __init__(self, config: AppConfig, engines: DeploymentHandle, router_id: str) -> None:
        self.config = config
        self._folder = config.model_dir(with_weights=False)
        self.needs_torch = any(needs_torch(self._folder) for needs_torch in hooks("needs_torch"))
        """Whether its requests are prepared with torch."""
        self.source = ServeEngines(engines, config.text_identity())
        self.pool = EnginePool(
            self.source,
            max_num_seqs=config.most_num_seqs(),
            max_queued_requests=config.max_queued_requests,
            engine_wait_s=config.engine_wait_s,
            may_sleep=config.may_sleep(),
            grace_s=config.shutdown_timeout_s,
        )
        self._named_adapters = NamedAdapters(self.pool.adapters)
        self.own = RouterFigures(router_id, lambda: self.pool.num_admitted)
        self.figures = FleetFigures(config.model_name(), lambda: self.pool.engine_ids, self._stats, self.own)

    async def start(self) -> None:
        """Read the tokenizer; wait for the first engine."""
        self._tokenizer = Tokenizer.load(self._folder, self.config.own_template())
        self._parsers = parsers_of(self.config, self._tokenizer.chat_template)
        described = self._parsers.describe()
        logger.info("%s.", described[:1].upper() + described[1:])
        await self.pool.start()

    async def take(self, live: LiveOptions) -> None:
        """Let what was changed hold from now on, and what was not be as the settings say.

        Raises:
            ValueError: an adapter cannot be served; one line.
        """
        if (problem := self._problem_of(live.lora_modules)) is not None:
            raise ValueError(f"user_config.lora_modules: {problem}")
        await self._named_adapters.take(live.lora_modules)
        queued, wait_s = live.max_queued_requests, live.engine_wait_s
        self.pool.limit(
            self.config.max_queued_requests if queued is None else queued,
            self.config.engine_wait_s if wait_s is None else wait_s,
        )

    def _problem_of(self, adapters: Mapping[str, str]) -> str | None:
        """Why none of these can be served, whatever is in their folders."""
        config = self.config
        if not adapters:
            return None
        if config.lora_update_dir is None:
            return "there is no lora_update_dir, so engines have no room for adapters that come later"
        if config.may_sleep():
            return "with min_replicas 0 there may be no engine to read them; the setting lora_modules does"
        taken = [name for name in adapters if name in config.all_names()]
        return f"the settings have {taken[0]!r} already" if taken else None

    def new_service(self, beside: CompletionService | None = None) -> CompletionService:
        """What answers requests, once it has started; `beside`: of another model of the same router."""
        config = self.config
        return CompletionService(
            self.pool,
            self._tokenizer,
            self._parsers,
            self.own,
            first("prompt_reader", config, self.pool.info.takes, self._folder, self._tokenizer),
            config.max_answer_bytes,
            takes_templates=config.chat_template == OF_REQUESTS,
            aliases=config.model_names()[1:],
            beside=beside,
            of_parts={name: made for surface in hooks("surface") for name, made in surface(config).items()},
        )

    def _stats(self, engine_id: str, report: dict[str, Any]) -> Awaitable[dict[str, Any]]:
        return self.source.call(engine_id, "stats", report=report)
