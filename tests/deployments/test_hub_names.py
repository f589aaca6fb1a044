"""A model and a drafter by hub name: settings, the check before the start, and the name that clients see."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.ports import free_port
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.cli.options import build_config
from wingbeat.deployments.parts import hooks
from wingbeat.runtime import hub
from wingbeat.runtime.demo import demo_pair


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the demo pair as org/model and org/head, on a machine that is offline."""
    hub._fetch.cache_clear()
    folder = tmp_path / "hub"
    for name, source in (("model", demo_pair().verifier), ("head", demo_pair().drafter)):
        repository = folder / f"models--org--{name}"
        (repository / "snapshots").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("c" * 40)
        (repository / "snapshots" / ("c" * 40)).symlink_to(source)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_pair_of_the_hub_passes_the_check_before_the_start():
    config = build_config(AppConfig, {"model": "org/model@main", "drafter": "org/head"})
    assert os.path.samefile(config.model_dir(), demo_pair().verifier)
    assert os.path.samefile(config.choice().source, demo_pair().drafter)
    for check in hooks("check_start"):
        check(config, "127.0.0.1", free_port())


@pytest.mark.parametrize(("model", "name"), [("org/model", "org/model"), ("org/model@main", "org/model")])
def test_clients_call_a_model_of_the_hub_by_its_name_there(model: str, name: str):
    assert AppConfig(model=model, drafter="none").model_name() == name


def test_a_configuration_alone_fetches_no_weights(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "_fetch", lambda name, with_weights: pytest.fail(f"{name} is fetched"))
    config = AppConfig(model="org/model", drafter=str(demo_pair().drafter))
    assert (config.model_name(), config.has_drafter()) == ("org/model", True)


@pytest.mark.parametrize("options", [["org/absent"], ["--drafter", "org/absent"], ["org/model", "org/absent"]])
def test_what_is_not_to_be_had_is_one_line_of_the_command(options: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *options])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert "org/absent of the Hugging Face hub is not in the cache" in said
