"""Checkpoints whose files hold code: no command that reads a model or a drafter runs any of it."""

import builtins
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.deployments.engine_in_process import build_in_process
from tests.needs import needs
from tests.runtime.models import DEMO_PAIR
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.runtime.tokenizer import Tokenizer

VERIFIER, HEAD = DEMO_PAIR / "verifier", DEMO_PAIR / "drafter"
CODE = """
from pathlib import Path
Path({trace!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTImageProcessor
class Config(LlamaConfig):
    model_type = "planted"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
class Processor(ViTImageProcessor):
    pass
def generate(*args, **options):
    return None
"""
AUTO_MAP = {
    "AutoConfig": "planted.Config",
    "AutoModel": "planted.Model",
    "AutoModelForCausalLM": "planted.Model",
    "AutoModelForImageTextToText": "planted.Model",
    "AutoTokenizer": ["planted.Tokenizer", "planted.Tokenizer"],
    "AutoProcessor": "planted.Processor",
    "AutoImageProcessor": "planted.Processor",
    "AutoFeatureExtractor": "planted.Processor",
}
ESCAPE = "{{ cycler.__init__.__globals__.os.system('touch TRACE') }}{{ ''.__class__.__mro__[1].__subclasses__() }}"


class Runs:
    """Pickled, it touches a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.trace,)


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def plant(source: Path, folder: Path, trace: Path, unknown: bool = True, pickled: bool = False) -> Path:
    """A copy of a checkpoint with code wherever a library may look for some.

    Args:
        unknown: give it a model_type that transformers has no class for.
        pickled: hold code in the weight file too.
    """
    shutil.copytree(source, folder)
    for file in ("planted.py", "custom_generate/generate.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(CODE.format(trace=str(trace)))
    kind = {"model_type": "planted"} if unknown else {}
    edit(folder / "config.json", auto_map=AUTO_MAP, custom_generate=str(folder), **kind)
    for file in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json"):
        edit(folder / file, auto_map=AUTO_MAP, base_model_name_or_path=str(folder))
    if unknown:
        edit(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", chat_template=ESCAPE)
    if pickled:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Runs(trace)}))
    return folder


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that planted code would create; questions on the terminal are answered yes, as by a user in a hurry."""
    trace = tmp_path / "ran"

    def answer(question: str = "") -> str:
        (tmp_path / "asked").write_text(question)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return trace


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """A command; an engine is started in this process in the place of Ray.

    Fails where planted code has run, or was asked about.
    """
    from wingbeat.deployments import launch

    def start(config: AppConfig, *args: object) -> None:
        try:
            build_in_process(config)
        except (ValueError, OSError) as error:
            raise launch.StartError(str(error)) from None

    monkeypatch.setattr(launch, "serve_until_stopped", start)

    def run(*args: str | Path) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert not trace.exists(), "planted code has run"
        assert not (trace.parent / "asked").exists(), "somebody was asked whether to run it"
        return SimpleNamespace(code=ended.value.code, err=captured.err, out=captured.out)

    return run


COMMANDS = {
    "serve": ("serve", "{model}", "--drafter", "none"),
    "generate": ("generate", "hi", "--model", "{model}", "--drafter", "none", "--max-tokens", "2"),
    "bench": ("bench", "--model", "{model}", "--drafter", "none"),
    "inspect": ("inspect", "{model}"),
    "extract": ("extract", "--model", "{model}", "--output", "{out}", "--sequences", "1"),
    "train": ("train", "drafter", "--verifier", "{model}", "--output", "{out}"),
    "build-engine": ("build-engine", "--model", "{model}", "--out", "{out}", "--onnx-only"),
}


def filled(words: tuple[str, ...], **values: Path) -> list[str]:
    return [word.format(**{name: str(value) for name, value in values.items()}) for word in words]


@pytest.mark.few(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_of_an_unknown_type_is_refused_in_one_line(command: str, tmp_path: Path, trace: Path, run):
    folder = plant(VERIFIER, tmp_path / "model", trace)
    got = run(*filled(COMMANDS[command], model=folder, out=tmp_path / "out"))
    assert got.code == 2
    assert got.err.strip().splitlines()[-1:]
    assert "Traceback" not in got.err
    assert "model_type 'planted'" in got.err
    assert "auto_map" in got.err
    assert "trust_remote_code=True" not in got.err


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["generate", "serve", "inspect"])
def test_a_pickle_that_is_code_is_refused_in_one_line(command: str, tmp_path: Path, trace: Path, run):
    folder = plant(VERIFIER, tmp_path / "model", trace, unknown=False, pickled=True)
    got = run(*filled(COMMANDS[command], model=folder, out=tmp_path / "out"))
    assert "holds code beside weights" in got.err or "no weights in it" in got.err
    assert "arbitrary code" not in got.err


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["generate", "bench", "inspect", "serve", "extract", "train"])
def test_a_model_that_transformers_knows_runs_by_its_class_alone(
    command: str, tiny_model: Path, tmp_path: Path, trace: Path, run
):
    folder = plant(tiny_model, tmp_path / "model", trace, unknown=False)
    options = {
        "bench": ("--repeat", "1", "--max-tokens", "2"),
        "train": ("--steps", "1", "--batch-size", "1", "--rollout-rows", "0"),
    }
    got = run(*filled(COMMANDS[command], model=folder, out=tmp_path / "out"), *options.get(command, ()))
    assert "Traceback" not in got.err


@needs("local")
@pytest.mark.parametrize("unknown", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_draft_model_runs_none_either(unknown: bool, tiny_model: Path, tmp_path: Path, trace: Path, run):
    folder = plant(tiny_model, tmp_path / "drafter", trace, unknown)
    got = run("generate", "hi", "--model", tiny_model, "--drafter", folder, "--max-tokens", "2", "--allow-bad-drafter")
    assert got.code == (2 if unknown else 0), got.err
    assert "Traceback" not in got.err


@pytest.mark.slow
@needs("local")
@pytest.mark.parametrize("unknown", [True, False])
def test_a_head_runs_none_either(unknown: bool, tmp_path: Path, trace: Path, run):
    folder = plant(HEAD, tmp_path / "drafter", trace, unknown)
    got = run("generate", "hi", "--model", VERIFIER, "--drafter", folder, "--max-tokens", "2")
    assert got.code == 0
    assert "Traceback" not in got.err


@needs("lora")
def test_an_adapter_runs_none_either(tmp_path: Path, trace: Path, run):
    folder = plant(HEAD, tmp_path / "adapter", trace, unknown=False)
    got = run("serve", VERIFIER, "--lora-modules", json.dumps({"planted": str(folder)}))
    assert got.code == 2
    assert len(got.err.splitlines()) == 1


@pytest.mark.parametrize("template", [ESCAPE, "{% set x = ().__class__.__base__.__subclasses__() %}{{ x }}"])
def test_a_chat_template_cannot_leave_its_sandbox(template: str, tmp_path: Path, trace: Path):
    shutil.copytree(VERIFIER, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template.replace("TRACE", str(trace)))
    tokenizer = Tokenizer.load(tmp_path / "model")
    with pytest.raises(ValueError, match="the chat template refuses"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert not trace.exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(tmp_path: Path, trace: Path):
    check_refused(Tokenizer.load, tmp_path, trace)


def check_refused(read: Callable[[Path], object], tmp_path: Path, trace: Path) -> None:
    """A model's folder that needs code of its own is not read, and nothing of it runs."""
    folder = plant(VERIFIER, tmp_path / "model", trace)
    with pytest.raises(ValueError, match="never run") as refused:
        read(folder)
    assert "\n" not in str(refused.value)
    assert "trust_remote_code=True" not in str(refused.value)
    assert not trace.exists()
