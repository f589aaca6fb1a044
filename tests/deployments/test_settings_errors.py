"""Wrong settings from every source: a line with the setting's name and the correction, without addresses."""

import pickle

import click
import pytest
from pydantic import ValidationError
from ray.serve import Application

import wingbeat
from wingbeat.deployments import app
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.problems import SettingsError


@pytest.mark.parametrize("build", [app.build, wingbeat.build])
def test_an_application_is_built_of_a_dict_as_of_settings(build):
    assert isinstance(build({"drafter": "none"}), Application)
    assert isinstance(build(AppConfig(drafter="none")), Application)
    assert isinstance(build({}), Application)


def test_tools_that_take_no_function_find_the_demo_as_an_application():
    assert isinstance(app.app, Application)
    with pytest.raises(AttributeError, match="has no attribute 'apps'"):
        _ = app.apps


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"model": "/no/such"}, "model is '/no/such': there is no folder /no/such"),
        ({"modle": "x"}, "there is no setting modle: did you mean model?"),
        ({"qqq": 1}, "there is no setting qqq"),
        ({"max_num_seqs": "many"}, "max_num_seqs many: input should be a valid integer"),
        ({"speculative_config": {}}, "there is no setting speculative_config: name the drafter with drafter"),
        ({"enforce_eager": True}, "there is no setting enforce_eager: vLLM's option, here cuda_graphs none"),
        ({"drafters": {"num": 0}}, "drafters.num 0: input should be greater than or equal to 1"),
        ({"api_key": 5}, "api_key: input should be"),
        ({"tool_call_parser": "json:loads"}, "tool_call_parser is 'json:loads': must be a class derived"),
        ({"tool_call_parser": "collections:OrderedDict"}, "must be a class derived from wingbeat.deployments.parsing"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line_that_ray_prints_as_such(settings: dict, line: str):
    with pytest.raises(SettingsError) as refused:
        wingbeat.build(settings)
    assert line in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert isinstance(refused.value, click.ClickException), "Ray's command prints these without a traceback"
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value), "it comes back from a process"


@pytest.mark.parametrize(
    "values", [{"max_num_seqs": "many"}, {"nonsense": 1}, {"engine_dir": "/x"}, {"drafters": {"num": 0}}], ids=str
)
def test_no_error_of_python_settings_shows_an_address_of_pydantic(values: dict):
    for made in (lambda: AppConfig(**values), lambda: AppConfig.model_validate(values)):
        with pytest.raises(ValidationError) as refused:
            made()
        assert "http" not in str(refused.value)
        assert next(iter(values)) in str(refused.value)
