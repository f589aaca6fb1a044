"""Kinds of folders by names alone: heads are told from models, whoever wrote them."""

from pathlib import Path

import pytest

from wingbeat.runtime.folder_kinds import head_problem, pointer_problem
from wingbeat.runtime.tensor_files import tensor_files

DEMO_PAIR = Path(__file__).parents[2] / "examples" / "demo_pair"
FOLDER = Path("somewhere")


@pytest.mark.parametrize("name", ["drafter", "dflash2"])
def test_heads_are_no_models(name: str):
    assert "give it as the drafter" in head_problem(FOLDER, tensor_files(DEMO_PAIR / name))


@pytest.mark.parametrize("name", ["verifier", "draft_model"])
def test_models_are_no_heads(name: str):
    assert head_problem(FOLDER, tensor_files(DEMO_PAIR / name)) is None


def test_a_model_that_was_saved_without_its_prefix_is_no_head():
    assert head_problem(FOLDER, ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"]) is None


def test_a_pointer_is_told_from_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "git lfs pull" in pointer_problem(tmp_path / "file")
    (tmp_path / "file").write_text("{}")
    assert pointer_problem(tmp_path / "file") is None
    assert pointer_problem(tmp_path / "absent") is None
