"""Curves of a run: what is in the image and in TensorBoard's files, also of a run that was continued."""

import sys
from importlib.machinery import ModuleSpec

import pytest
from pydantic import ValidationError

from tests.runtime.training_world import losses, make_corpus, make_verifier, metrics, short_run
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.training import drafter_config as training_config
from wingbeat.runtime.training.curves import CURVES_FILE, EVENTS_FOLDER
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.losses import DraftLoss

pytestmark = pytest.mark.few(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_verifier(root)
    make_corpus(root)
    return root


@pytest.fixture
def config(world, tmp_path):
    return short_run(world, tmp_path / "out", tensorboard=True, validation_prompts=2, validation_interval_steps=3)


def events(config, tag: str) -> dict[int, float]:
    """Values of a tag by step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(config.output / EVENTS_FOLDER))
    shown.Reload()
    return {event.step: event.value for event in shown.Scalars(tag)}


@pytest.mark.slow
def test_tensorboard_shows_the_losses_and_the_measured_acceptance(config):
    train_drafter(config, InProcessChannel)
    assert events(config, "train/loss") == pytest.approx(dict(enumerate(losses(config))), abs=1e-3)
    measured = metrics(config)["validations"]
    assert [entry["step"] for entry in measured] == [3, 6]
    lengths = {entry["step"]: entry["length"] for entry in measured}
    assert events(config, "validation/tokens_per_round") == pytest.approx(lengths)
    first = {entry["step"]: entry["by_depth"][0] for entry in measured}
    assert events(config, "validation/acceptance_depth_1") == pytest.approx(first)


@pytest.mark.slow
def test_a_continued_run_has_every_step_once(config, monkeypatch):
    config = config.model_copy(update={"checkpoint_interval_s": 1e-9})
    real_forward, calls = DraftLoss.forward, []

    def dying_forward(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real_forward(*args)

    monkeypatch.setattr(DraftLoss, "forward", dying_forward)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(config, InProcessChannel)
    monkeypatch.setattr(DraftLoss, "forward", real_forward)
    train_drafter(config, InProcessChannel)
    assert sorted(events(config, "train/loss")) == list(range(6))
    assert [entry["step"] for entry in metrics(config)["validations"]] == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [0, 2], ids=["loss alone", "with acceptance"])
def test_the_image_shows_loss_and_acceptance(config, prompts):
    from matplotlib.image import imread

    config = config.model_copy(update={"plot": True, "tensorboard": False, "validation_prompts": prompts})
    train_drafter(config, InProcessChannel)
    height, width, _ = imread(config.output / CURVES_FILE).shape
    # A second panel for acceptance, where it was measured.
    assert (width > 2 * height) == (prompts > 0)
    assert not (config.output / EVENTS_FOLDER).exists()


@pytest.mark.parametrize(("option", "package"), [("plot", "matplotlib"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_named_with_its_remedy(world, tmp_path, monkeypatch, option, package):
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == package else sys.modules["json"].__spec__

    monkeypatch.setattr(training_config, "find_spec", find_spec)
    with pytest.raises(ValidationError, match=rf"{option}=true needs {package}: pip install 'wingbeat\[train\]'"):
        short_run(world, tmp_path / "out", **{option: True})
