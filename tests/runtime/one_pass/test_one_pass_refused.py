"""A one-pass head of another verifier is refused from its files, before a weight of the verifier is read."""

import re
from pathlib import Path

import pytest

from tests.runtime.heads.test_refused_early import start
from tests.runtime.loaded_kind import llama
from tests.runtime.one_pass.one_pass_world import HIDDEN, VOCAB, random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors


def saved(family: str, folder: Path, **fields) -> Path:
    if family == "p-eagle":
        raw = parallel_config((1, 2, 3), num_layers=2)
        return save_head(folder, raw | fields, parallel_tensors(raw))
    raw = raw_config(family, (0, 1, 2), num_layers=2, block_size=10)
    return save_head(folder, raw | fields, random_tensors(raw))


@pytest.mark.parametrize("family", ["dflash", "jetspec", "dspark-vanilla", "dflash2", "p-eagle"])
@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"vocab_size": 128}, (128, VOCAB)),
        ({"target_hidden_size": 128}, (128, HIDDEN)),
        ({"target_layer_ids": [1, 7, 9], "eagle_aux_hidden_state_layer_ids": [1, 7, 9]}, (9, r"target of 4|0\.\.3")),
    ],
    ids=["vocabulary", "width", "layers"],
)
def test_a_head_of_another_verifier_is_refused_by_both_values(family, fields, values, tmp_path, monkeypatch):
    _, target = llama(tmp_path / "verifier")
    with pytest.raises(ValueError, match=r"^drafter head: ") as refused:
        start(target.path, saved(family, tmp_path / "head", **fields), monkeypatch)
    assert len(str(refused.value).splitlines()) == 1
    for value in values:
        assert re.search(str(value), str(refused.value))


@pytest.mark.parametrize("family", ["dflash2", "p-eagle"])
def test_a_head_of_this_verifier_is_not(family, tmp_path, monkeypatch):
    _, target = llama(tmp_path / "verifier")
    with pytest.raises(AssertionError, match="weights are read"):
        start(target.path, saved(family, tmp_path / "head"), monkeypatch)
