"""Updates of weights: never half of one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.runtime.models import random_model
from tests.runtime.rollouts.test_served_weights import moved, values_of, written
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.rollouts.update import WeightUpdate, WrongOrder, read_checkpoint, read_files
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.fixture
def loaded() -> LoadedModel:
    return prepare_model(random_model("llama"), "served")


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    return values_of(moved(random_model("llama")))


def write(update: WeightUpdate, values: dict[str, Tensor]) -> None:
    update.write(values.items)


def test_an_update_in_pieces_is_that_of_the_whole(loaded: LoadedModel, values: dict[str, Tensor]):
    update = WeightUpdate(ServedWeights(loaded))
    update.start()
    for name, value in values.items():
        write(update, {name: value})
    assert update.finish() == len(values)
    assert written(loaded) == written(prepare_model(moved(random_model("llama")), "fresh"))


@pytest.mark.parametrize("step", ["write", "finish", "start twice"])
def test_steps_out_of_order_are_refused(loaded: LoadedModel, values: dict[str, Tensor], step: str):
    update = WeightUpdate(ServedWeights(loaded))
    if step == "start twice":
        update.start()
    with pytest.raises(WrongOrder, match="under way" if step == "start twice" else "no weight update has started"):
        {"write": lambda: write(update, values), "finish": update.finish, "start twice": update.start}[step]()


def test_what_does_not_fit_is_refused_before_anything_of_it_is_written(loaded: LoadedModel, values: dict[str, Tensor]):
    before = ServedWeights(loaded).checksums()
    update = WeightUpdate(ServedWeights(loaded))
    update.start()
    spoiled = values | {"lm_head.weight": torch.full_like(values["lm_head.weight"], float("nan"))}
    with pytest.raises(WeightsRefused, match=r"^lm_head.weight holds NaN"):
        write(update, spoiled)
    assert update.weights.checksums() == before
    update.abandon()
    assert not update.torn


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tensor_is_written_once(name: str):
    model = random_model("llama", tie_word_embeddings=True)
    update = WeightUpdate(ServedWeights(prepare_model(model, "served")))
    update.start()
    value = {name: torch.zeros_like(model.get_input_embeddings().weight)}
    write(update, value)
    with pytest.raises(WeightsRefused, match=f"^{name} is written twice"):
        write(update, value)


def test_an_update_without_tensors_is_refused(loaded: LoadedModel):
    update = WeightUpdate(ServedWeights(loaded))
    update.start()
    with pytest.raises(WeightsRefused, match="no tensors"):
        write(update, {})


def test_what_an_update_that_does_not_end_has_written_must_be_written_again(loaded, values):
    update = WeightUpdate(ServedWeights(loaded))
    update.start()
    first, *others = values
    write(update, {first: values[first]})
    update.abandon()
    assert update.torn == {update.weights.same(first)}
    update.start()
    write(update, {others[0]: values[others[0]]})
    with pytest.raises(WeightsRefused, match=f"1 tensors are unknown .* {first}$"):
        update.finish()
    write(update, {name: values[name] for name in (first, *others[1:])})
    update.finish()
    assert written(loaded) == written(prepare_model(moved(random_model("llama")), "fresh"))


def test_a_journal_puts_the_old_weights_back(loaded: LoadedModel, values: dict[str, Tensor]):
    before, text = ServedWeights(loaded).checksums(), written(loaded)
    update = WeightUpdate(ServedWeights(loaded), keeps_journal=True)
    update.start()
    write(update, dict(list(values.items())[:9]))
    update.abandon()
    assert not update.torn
    assert update.weights.checksums() == before
    assert written(loaded) == text


def test_after_all_was_lost_every_tensor_is_wanted(loaded: LoadedModel, values: dict[str, Tensor]):
    update = WeightUpdate(ServedWeights(loaded))
    update.lose()
    update.start()
    write(update, dict(list(values.items())[1:]))
    with pytest.raises(WeightsRefused, match="1 tensors are unknown"):
        update.finish()


def test_files_are_read_tensor_by_tensor(tmp_path: Path):
    values = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(values, tmp_path / "x.safetensors")
    found = dict(read_files([str(tmp_path / "x.safetensors")]))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in values.items()}


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b"", "x.safetensors", "cannot be read"),
        (b"\x08\0\0\0\0\0\0\0{}      ", "no.safetensors", "cannot be read: No such file"),
        (b"pickle", "x.safetensors", "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_path(tmp_path: Path, content: bytes, name: str, reason: str):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(WeightsRefused, match=f"^{tmp_path / name} {reason}"):
        list(read_files([str(tmp_path / name)]))


def test_a_path_is_absolute():
    with pytest.raises(WeightsRefused, match="must be an absolute path"):
        list(read_files(["x.safetensors"]))


def test_a_checkpoint_is_read_once_per_weight_and_has_to_hold_all_of_them(tmp_path: Path, loaded: LoadedModel):
    weights = ServedWeights(loaded)
    names = weights.names()
    more = {"model.rotary_emb.inv_freq": torch.ones(2), **values_of(loaded.model)}
    save_file(more, tmp_path / "a.safetensors")
    save_file({names[0]: torch.zeros(1)}, tmp_path / "b.safetensors")
    assert sorted(name for name, _ in read_checkpoint(tmp_path, weights)) == sorted(names)
    save_file({name: value for name, value in more.items() if name != names[-1]}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsRefused, match=f"has no tensor named {names[-1]}"):
        list(read_checkpoint(tmp_path, weights))
