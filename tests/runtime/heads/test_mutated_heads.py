"""A head's config.json with one wrong field: refused by one line, or loaded as a head whose drafts are numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.runtime.heads.head_folder import VOCAB, edit_config, edit_tensors, load
from tests.runtime.mutations import Mutation, mutations, some
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.save import save_eagle_head

CONFIG = "config.json"


@pytest.fixture(params=["specforge", "speculators"])
def saved(head: EagleHead, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "head"
    save_eagle_head(head, folder, layout=request.param)
    if request.param == "specforge":
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
        edit_config(folder, rope_parameters=yarn, norm_output=False, rms_norm_eps=1e-6)
    return folder


def check(saved: Path, folder: Path, mutation: Mutation) -> None:
    shutil.copytree(saved, folder)
    mutation.write(folder)
    head, lines = None, []
    try:
        head = load(folder)
    except CheckpointError as error:
        lines = str(error).splitlines()
    if head is None:
        assert len(lines) == 1, lines
        return
    tokens, taps, positions = torch.arange(3), torch.randn(3, head.taps_size), torch.arange(3) + 90
    out = head.logits(head(tokens, head.fuse(taps), head.rotary(positions), lambda query, key, value: query))
    assert out.isfinite().all(), mutation
    assert int(head.draft_token_ids.min()) >= 0, mutation
    assert int(head.draft_token_ids.max()) < VOCAB, mutation


@pytest.mark.few(1)
def test_one_wrong_field_is_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    for index, mutation in enumerate(some(mutations(saved, CONFIG), 60)):
        check(saved, tmp_path / str(index), mutation)


@pytest.mark.slow
def test_every_wrong_field_is_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    for index, mutation in enumerate(mutations(saved, CONFIG)):
        check(saved, tmp_path / str(index), mutation)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_theta": -1, "rope_parameters": None}, "rope_theta is -1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta is -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"head_dim": 0}, "head_dim=0 is not a positive integer"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"eagle_config": [1]}, "eagle_config=.* is not an object"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.0, 3, 4]}, "wingbeat_convention": None},
            "not a list",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}, "wingbeat_convention": None}, "not a list"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_right_is_refused_by_its_name(folder: Path, fields: dict, says: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(CheckpointError, match=says):
        load(folder)


@pytest.mark.parametrize("offset", [-1000, 1000, 2**40])
def test_a_map_out_of_the_vocabulary_is_refused(folder: Path, offset: int) -> None:
    edit_tensors(folder, lambda tensors: tensors["d2t"][-1:].fill_(offset))
    with pytest.raises(CheckpointError, match="d2t points outside the target's vocabulary of 40"):
        load(folder)


def test_a_config_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="must hold an object"):
        load(folder)
