"""Kind of embeddings of a model: set by its folder's files or by the operator."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.embeddings.settings import embedding_kind_of, pooling_of
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.pooling.pooling import Pooling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in demo_pair().verifier.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    return tmp_path


def says(folder: Path, **modes: bool) -> AppConfig:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    return AppConfig(model=folder, drafter="none")


def test_a_folder_of_sentence_transformers_says_it(folder: Path):
    off = {"pooling_mode_cls_token": False}
    assert pooling_of(says(folder, pooling_mode_lasttoken=True, **off)) is Pooling.LAST
    assert pooling_of(says(folder, pooling_mode_mean_tokens=True, include_prompt=True)) is Pooling.MEAN
    assert pooling_of(says(folder)) is None
    with pytest.raises(ValueError, match="pooling_mode_cls_token; give mean, last or none"):
        pooling_of(says(folder, pooling_mode_cls_token=True))


def test_the_setting_goes_before_the_folder(folder: Path):
    says(folder, pooling_mode_lasttoken=True)
    assert pooling_of(AppConfig(model=folder, drafter="none", embeddings="mean")) is Pooling.MEAN
    assert pooling_of(AppConfig(model=folder, drafter="none", embeddings="none")) is None
    assert pooling_of(AppConfig()) is None


def test_a_model_that_was_trained_for_it_has_embeddings_to_cut(folder: Path):
    config = says(folder, pooling_mode_mean_tokens=True)
    assert not embedding_kind_of(config).can_be_cut
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(text | {"is_matryoshka": True}))
    assert embedding_kind_of(config).can_be_cut


def test_another_engine_has_none():
    with pytest.raises(ValidationError, match="expose no hidden states"):
        AppConfig(embeddings="mean", engine_factory="module:function")
    assert pooling_of(AppConfig(engine_factory="module:function")) is None
