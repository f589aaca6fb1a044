"""The door for those who come from Ray Serve LLM: their YAML, with another `import_path`.

applications:
- import_path: wingbeat.deployments.ray_llm:build_openai_app    # was ray.serve.llm:build_openai_app
  args: {llm_configs: [...]}
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
    """The application for arguments of `ray.serve.llm.build_openai_app`; needs neither `ray[llm]` nor vLLM.

    Args:
        args: an object with `llm_configs`, whose entries are objects, YAML files, YAML text or Ray's own `LLMConfig`.

    Raises:
        SettingsError: a field is unknown, not served, or wrong; one line that names it and says what to write.
    """
    config, accelerator_types, notes = settings_of(args)
    if notes:
        logger.warning("%s.", "; ".join(notes))
    return build_placed(config, accelerator_types)


def settings_of(args: Any) -> tuple[AppConfig, list[str | None], list[str]]:
    """The settings, by model Ray's name of the GPUs that pairs are on, and a line for each field that changes nothing.

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
