"""`models:` in the settings."""

import re

import pytest
from pydantic import ValidationError

from wingbeat.deployments.app import build, verifier_names
from wingbeat.deployments.app_config import AppConfig

TWO = ({"served_model_name": "org/one,first"}, {"served_model_name": "two", "drafter": "none", "max_num_seqs": 2})


def test_each_model_has_what_is_common_and_what_is_its_own():
    one, two = AppConfig(models=TWO, max_num_seqs=4, api_key="secret").served()
    assert (one.model_names(), one.max_num_seqs, one.drafter) == (("org/one", "first"), 4, "auto")
    assert (two.model_names(), two.max_num_seqs, two.drafter) == (("two",), 2, "none")
    assert one.models is two.models is None
    assert one.api_key == two.api_key


def test_the_command_line_takes_them_as_json():
    assert AppConfig(models='[{"served_model_name": "a"}, {"served_model_name": "b"}]').served()[1].model_name() == "b"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"models": [{}, {}]}, "two models have the name 'wingbeat-demo'"),
        ({"models": [{"served_model_name": "a,b"}, {"served_model_name": "b"}]}, "the name 'b'"),
        ({"models": [{"api_key": "x"}]}, "models[0].api_key: all models share it; put it beside models"),
        ({"models": [{}, {"models": []}]}, "models[1].models: all models share it"),
        ({"models": [{}], "drafter": "none"}, "drafter is given beside models: put it into the entry"),
        ({"models": [{"dafter": "none"}]}, "there is no setting models[0].dafter: did you mean models[0].drafter?"),
        ({"models": [{"block_size": 0}]}, "models[0]: block_size"),
        ({"models": []}, "must be a list of objects"),
        ({"models": "{"}, "must be a JSON object"),
        ({"served_model_name": "a,,b"}, "must be names separated by commas"),
        ({"served_model_name": "a,a"}, "must be names separated by commas"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_its_place(settings: dict, line: str):
    with pytest.raises(ValidationError, match=re.escape(line)):
        AppConfig(**settings)


def test_each_model_has_deployments_of_its_own_with_names_that_files_can_have():
    config = AppConfig(models=[*TWO, {"served_model_name": "org-one"}])
    names = verifier_names(config)
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"Verifier_[A-Za-z0-9._-]+", name) for name in names)
    assert names[1] == "Verifier_two"
    bound = build({"models": list(TWO)})._bound_deployment.init_args[1]
    assert [one._bound_deployment.name for one in bound] == names[:2]


def test_each_of_several_models_has_a_thread():
    one, other = AppConfig(models=[{"served_model_name": "a"}, {"served_model_name": "b", "threads": 2}]).served()
    assert (one.num_threads(), other.num_threads()) == (1, 2)
