"""Serves YAML files that were written for Ray Serve LLM; only their `import_path` must be changed.

applications:
- import_path: wingbeat.deployments.ray_llm:build_openai_app    # was ray.serve.llm:build_openai_app args: {llm_configs:
  [...]}
"""

import logging
from typing import Any

from pydantic import ValidationError
from ray.serve import Application

from wingbeat.deployments.app import build_placed
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.problems import SettingsError, first_problem
from wingbeat.deployments.ray_llm.llm_args import read_args

logger = logging.getLogger(__name__)


def build_openai_app(args: Any) -> Application:
    """Builds the application from arguments of `ray.serve.llm.build_openai_app`, without `ray[llm]` or vLLM installed.

    Args:
        args: an object with `llm_configs`, whose entries are objects, YAML files, YAML text or Ray's own `LLMConfig`.

    Raises:
        SettingsError: a field is unknown, not supported, or wrong; the message is one line that names the field and the
            remedy.
    """
    config, accelerator_types, notes = settings_of(args)
    if notes:
        logger.warning("%s.", "; ".join(notes))
    return build_placed(config, accelerator_types)


def settings_of(args: Any) -> tuple[AppConfig, list[str | None], list[str]]:
    """Translates the arguments of `build_openai_app` to settings.

    Returns:
        (settings, for each model Ray's accelerator type or None, a message for each field that is ignored).

    Raises:
        SettingsError: as `build_openai_app`.
    """
    try:
        said = read_args(args, AppConfig.model_fields)
        return AppConfig(**said.settings), said.accelerator_types, said.notes
    except ValidationError as error:
        raise SettingsError(first_problem(error, AppConfig)) from None
    except ValueError as error:
        raise SettingsError(" ".join(str(error).split())) from None
