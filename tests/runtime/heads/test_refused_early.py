"""A head of another verifier is refused from its files, before a weight of the verifier is read."""

from pathlib import Path

import pytest
import torch

from tests.runtime.heads.head_folder import edit_config, edit_tensors
from tests.runtime.loaded_kind import llama
from tests.runtime.models import HIDDEN_SIZE, VOCAB_SIZE, engine_config, random_head
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime import pair
from wingbeat.runtime.heads.conventions import STATED
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.llm import LLM


def start(verifier: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a pair, up to the first weight of the verifier."""

    def read(*given: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(pair, "load_verifier", read)
    LLM(verifier, head, engine_config(), InProcessChannel, device="cpu")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A verifier of four layers, and its EAGLE-3 head, whose config does not name the verifier's hidden size."""
    ref, target = llama(tmp_path / "verifier")
    save_eagle_head(random_head(ref.loaded), tmp_path / "head")
    edit_config(tmp_path / "head", drop=("target_hidden_size",))
    return target.path, tmp_path / "head"


@pytest.mark.parametrize(
    ("edit", "values"),
    [
        (lambda head: edit_config(head, vocab_size=VOCAB_SIZE + 3), (VOCAB_SIZE + 3, VOCAB_SIZE)),
        (
            lambda head: edit_tensors(head, lambda held: held.update({"fc.weight": torch.zeros(32, 3 * 48)})),
            (3 * 48, 3 * HIDDEN_SIZE),
        ),
        (
            lambda head: edit_config(
                head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, drop=(STATED,)
            ),
            ([1, 5, 8], "0..3"),
        ),
    ],
    ids=["vocabulary", "width", "layers"],
)
def test_a_head_of_another_verifier_is_refused_by_both_values(edit, values, folders, monkeypatch):
    edit(folders[1])
    with pytest.raises(ValueError, match=r"^drafter head: ") as refused:
        start(*folders, monkeypatch)
    assert len(str(refused.value).splitlines()) == 1
    for value in values:
        assert str(value) in str(refused.value)


def test_a_head_of_this_verifier_is_not(folders, monkeypatch):
    with pytest.raises(AssertionError, match="weights are read"):
        start(*folders, monkeypatch)
