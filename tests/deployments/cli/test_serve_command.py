"""`wingbeat serve MODEL DRAFTER`, `--version` and the completion of shells."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.demo import demo_pair


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AppConfig]:
    """The configurations that reach the checks before a start, where each start ends."""
    seen: list[AppConfig] = []

    def check(config: AppConfig, *where: object) -> None:
        seen.append(config)
        raise ValueError("as far as it goes")

    monkeypatch.setattr(cli, "hooks", lambda name: (check,) if name == "check_start" else hooks(name))
    return seen


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    return ended.value.code


@pytest.mark.parametrize(
    "form", ["{model} none", "--drafter none {model}", "{model} --drafter none", "--model {model} --drafter none"]
)
def test_model_and_drafter_stand_with_and_without_their_options(asked, form):
    model = demo_pair().verifier
    run("serve", *form.format(model=model).split())
    assert [(config.model_dir(), config.choice().kind) for config in asked] == [(model, "none")]


@pytest.mark.parametrize("form", ["serve x --model y", "serve x none --drafter auto", "serve x y z"])
def test_what_is_given_twice_is_refused(asked, capsys, form):
    assert run(*form.split()) == 2
    assert not asked
    assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_the_packages(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"wingbeat {version('wingbeat')}\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("wingbeat ", {"serve", "generate"}),
        ("wingbeat serve --kv-c", {"--kv-cache-memory-bytes"}),
        ("wingbeat serve --dtype b", {"bfloat16"}),
    ],
)
def test_shells_complete_commands_options_and_choices(words, offered):
    environ = {"_WINGBEAT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "from wingbeat.deployments.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert offered <= set(done.stdout.split())
