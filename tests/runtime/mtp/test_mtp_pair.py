"""The two halves of a pair: a drafter that nobody has asked for ends no start."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.engine_checks.test_self_test import open_llm
from tests.runtime.models import CHAIN, engine_config
from tests.runtime.mtp.mtp_world import NUM_LAYERS, Modules
from tests.runtime.text_drafters import text_drafter
from wingbeat.runtime.drafters.choice import FALLBACK, parse_drafter
from wingbeat.runtime.engine_checks.self_test import LEAST_ACCEPTANCE, BadDrafterError
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.pair import PairSettings, drafter_of_pair

EDITS = {
    "missing": lambda t: t.pop(f"model.layers.{NUM_LAYERS}.hnorm.weight"),
    "four-bit": lambda t: t.update({f"model.layers.{NUM_LAYERS}.eh_proj.weight_scale_2": torch.ones(1)}),
    "shape": lambda t: t.update({f"model.layers.{NUM_LAYERS}.eh_proj.weight": torch.zeros(3, 3)}),
}


def settings(folder: Path, drafter: str) -> PairSettings:
    return PairSettings(folder, parse_drafter(drafter, folder), engine_config(CHAIN), torch.float32)


@pytest.mark.parametrize("edit", EDITS)
def test_modules_that_cannot_be_loaded_end_no_start_unless_they_were_asked_for(
    edit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    Modules.random("qwen3", 1).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    EDITS[edit](tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        drafter = drafter_of_pair(settings(tmp_path, "auto"), "cpu")
        assert drafter is None if FALLBACK.kind == "none" else type(drafter) is type(text_drafter(FALLBACK.kind, CHAIN))
    (record,) = (one for one in caplog.records if one.name.startswith("wingbeat."))
    line = record.getMessage()
    assert "drafter is auto" in line
    assert f"using drafter {FALLBACK.label} instead" in line
    assert "\n" not in line
    with pytest.raises(CheckpointError):
        drafter_of_pair(settings(tmp_path, "mtp"), "cpu")


def test_the_choice_of_auto_is_still_auto_where_it_is_passed_on(tmp_path: Path):
    Modules.random("qwen3", 1).save(tmp_path)
    choice = parse_drafter("auto", tmp_path)
    assert parse_drafter(choice.asked, tmp_path) == choice
    assert parse_drafter(parse_drafter("mtp", tmp_path).asked, tmp_path).automatic is False


@pytest.mark.slow
def test_prediction_modules_are_tested(tmp_path):
    Modules.random("deepseek_v3", 1).save(tmp_path)
    with pytest.raises(BadDrafterError, match="mtp"):
        open_llm((tmp_path, "mtp"))
    assert open_llm((tmp_path, "mtp"), allow_bad_drafter=True).self_test.first_position < LEAST_ACCEPTANCE
