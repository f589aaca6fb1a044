"""Starts that have been found right: checked again when a file or a setting has changed, and not before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import known_starts
from wingbeat.deployments.cli.apart import check_apart
from wingbeat.deployments.cli.known_starts import check_unless_known
from wingbeat.runtime.demo import demo_pair


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_pair().verifier, tmp_path / "model"))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AppConfig]:
    """The configurations that were checked."""
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path / "cache"))
    seen: list[AppConfig] = []
    monkeypatch.setattr(known_starts, "check_apart", lambda config, here: seen.append(config))
    return seen


def test_what_is_unchanged_is_checked_once(checked: list[AppConfig], model: Path):
    (model / "gone").symlink_to(model / "nothing")
    for _ in range(3):
        check_unless_known(AppConfig(model=model, drafter="ngram"), here=True)
    assert len(checked) == 1


@pytest.mark.parametrize("change", ["file", "new file", "setting", "place"])
def test_what_has_changed_is_checked_again(change: str, checked: list[AppConfig], model: Path):
    check_unless_known(AppConfig(model=model, drafter="ngram"), here=True)
    if change == "file":
        os.utime(model / "config.json", ns=(1, 1))
    if change == "new file":
        (model / "added_tokens.json").write_text("{}")
    settings = {"max_num_seqs": 3} if change == "setting" else {}
    check_unless_known(AppConfig(model=model, drafter="ngram", **settings), here=change != "place")
    assert len(checked) == 2


def test_what_was_refused_is_checked_again(monkeypatch: pytest.MonkeyPatch, checked: list[AppConfig], model: Path):
    def refuse(config: AppConfig, here: bool) -> None:
        checked.append(config)
        raise ValueError("no")

    monkeypatch.setattr(known_starts, "check_apart", refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            check_unless_known(AppConfig(model=model, drafter="ngram"), here=True)
    assert len(checked) == 2


@pytest.mark.parametrize(
    "setting", [{"drafter": "tests.drafters.Mine"}, {"drafter_factory": "tests.drafters:mine"}], ids=str
)
def test_code_of_the_users_is_looked_at_every_time(setting: dict[str, str], checked: list[AppConfig], model: Path):
    for _ in range(2):
        check_unless_known(AppConfig(model=model, **setting), here=True)
    assert len(checked) == 2


def test_the_check_leaves_the_command_without_torch_and_says_what_is_wrong(model: Path):
    script = (
        "import sys; from wingbeat.deployments.app_config import AppConfig; "
        "from wingbeat.deployments.cli.apart import check_apart; "
        "check_apart(AppConfig(model=sys.argv[1], drafter='ngram'), True); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, model], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="truncated or damaged") as refused:
        check_apart(AppConfig(model=model, drafter="ngram"), here=True)
    assert "\n" not in str(refused.value)


def test_a_check_that_is_killed_is_one_line(monkeypatch: pytest.MonkeyPatch, model: Path):
    killed = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: killed)
    with pytest.raises(ValueError, match="ended by signal 9"):
        check_apart(AppConfig(model=model, drafter="ngram"), here=True)
