"""Settings of adapters: names and folders from the command line, and refusals at the start."""

import pytest
from pydantic import ValidationError

from tests.runtime.lora_world import write_adapter
from tests.runtime.models import random_model
from wingbeat.deployments.app_config import AppConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return write_adapter(tmp_path_factory.mktemp("adapter"), random_model("llama"))


def test_adapters_are_named_in_one_option_or_in_json(folder):
    by_sign = AppConfig(lora_modules=f"sql={folder}, code={folder}")
    assert by_sign.lora_modules == {"sql": folder, "code": folder}
    assert AppConfig(lora_modules=f'{{"sql": "{folder}", "code": "{folder}"}}') == by_sign
    assert AppConfig(lora_modules="none").lora_modules is None


def test_without_adapters_there_is_no_room_for_any(folder, tmp_path):
    assert AppConfig(max_loras=3).engine_config().max_loras == 0
    for given in ({"lora_modules": f"sql={folder}"}, {"lora_update_dir": tmp_path}):
        limits = AppConfig(**given, max_loras=3, max_lora_rank=32).engine_config()
        assert (limits.max_loras, limits.max_lora_rank) == (3, 32)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lora_modules": "sql"}, "'sql' must read name=folder"),
        ({"lora_modules": "={folder}"}, "'' must read name=folder"),
        ({"lora_modules": "a={folder},a={folder}"}, "two adapters have the same name"),
        ({"lora_modules": "wingbeat-demo={folder}"}, "is that of the base model"),
        ({"lora_modules": "a=/nowhere"}, "there is no folder /nowhere"),
        ({"lora_modules": "{{"}, "is not JSON"),
        ({"lora_update_dir": "/nowhere"}, "lora_update_dir is '/nowhere': must be a directory"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_setting(folder, fields, problem):
    given = {name: value.format(folder=folder) if name == "lora_modules" else value for name, value in fields.items()}
    with pytest.raises(ValidationError) as refused:
        AppConfig(**given)
    assert problem in str(refused.value)
