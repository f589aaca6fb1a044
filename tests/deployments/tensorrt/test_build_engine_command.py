"""`wingbeat build-engine`, `inspect` of its output, and the options that serve it."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from tests.needs import needs
from tests.runtime.models import prepare_model, random_head, random_model
from tests.runtime.tensorrt.engine_world import base_config, draft_config
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.tensorrt.build_engine_command import BuildEngineConfig, rounding_note
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.tensorrt import builders
from wingbeat.runtime.tensorrt.engine_directory import write_config, write_draft_to_target


@pytest.fixture
def wingbeat(capsys):
    """Run a command; returns exit code, stdout and stderr."""

    def run(*args: str):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    """A directory without the files of its graphs."""
    folder = tmp_path_factory.mktemp("engines")
    loaded = prepare_model(random_model("mistral", num_hidden_layers=4), "mistral")
    head = random_head(loaded)
    write_config(folder, base_config(loaded, head.tap_layers))
    write_config(folder, draft_config(head))
    write_draft_to_target(folder, head.draft_token_ids)
    return folder


@needs("inspection")
def test_inspect_shows_both_engines(wingbeat, engine_dir):
    found = json.loads(wingbeat("inspect", engine_dir, "--json").out)
    assert found["kind"] == "engines"
    assert found["runs_on"] == ["cpu"]
    assert found["base"]["windows"] == [16]
    assert found["draft"]["tap_layers"] == found["base"]["tap_layers"] == [1, 2, 3]
    assert found["limits"]["max_kv_cache_capacity"] == 256
    assert "tap layers" in wingbeat("inspect", engine_dir).out


@needs("inspection")
def test_inspect_of_a_damaged_directory_is_one_line(wingbeat, tmp_path):
    (tmp_path / "base_config.json").write_text('{"name": 3}')
    got = wingbeat("inspect", tmp_path)
    assert got.code == 2
    assert "base_config.json: name: input should be a valid string" in got.err
    assert got.err.count("\n") == 1


def test_a_missing_builder_is_one_line_before_anything_is_loaded(wingbeat, tmp_path, monkeypatch):
    monkeypatch.setattr(builders, "_tensorrt", lambda: None)
    monkeypatch.setattr(builders, "_tensorrt_rtx", lambda: None)
    got = wingbeat("build-engine", "--out", tmp_path / "engines")
    assert got.code == 2
    assert "neither tensorrt nor tensorrt-rtx is installed: pip install" in got.err
    assert got.err.count("\n") == 1
    assert not (tmp_path / "engines").exists()


def test_float32_engines_are_refused(wingbeat, tmp_path):
    got = wingbeat("build-engine", "--out", tmp_path, "--dtype", "float32")
    assert got.code == 2
    assert "dtype is float32: engines are built in float16 or bfloat16" in got.err


def saved(folder, dtype: str | None):
    """A verifier whose config.json names this dtype of the stored weights."""
    random_model("llama").save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}))
    return folder


@pytest.mark.parametrize(
    ("stored", "asked", "built"),
    [
        ("float32", "auto", torch.float32),
        (None, "auto", torch.float32),
        ("float64", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("float32", "float16", torch.float16),
    ],
)
def test_a_model_is_exported_in_its_own_dtype_unless_another_is_asked_for(tmp_path, stored, asked, built):
    config = BuildEngineConfig(model=saved(tmp_path, stored), dtype=asked, out=tmp_path / "engines", onnx_only=True)
    assert config.plan().dtype == built


def test_engines_of_a_float32_model_are_built_when_a_half_is_asked_for_alone(tmp_path):
    with pytest.raises(ValueError, match=r"dtype is auto and .* is in float32: engines are built in float16 or"):
        BuildEngineConfig(model=saved(tmp_path, "float32"), out=tmp_path / "engines").plan()
    assert BuildEngineConfig(model=saved(tmp_path, "bfloat16"), out=tmp_path / "engines").plan().dtype == torch.bfloat16


@pytest.mark.slow
def test_what_a_half_rounds_of_a_float32_model_is_said(tmp_path):
    def note(dtype: str) -> str | None:
        folder = saved(tmp_path / "model", "float32")
        return rounding_note(BuildEngineConfig(model=folder, dtype=dtype, out=tmp_path, onnx_only=True).plan())

    said = note("bfloat16")
    assert re.fullmatch(
        r"model is in float32: in bfloat16 its logits differ by up to \d\.\de-0\d of their spread, and \d+ of \d+ best "
        r"tokens are others",
        said,
    ), said
    assert note("float32") is None


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_a_drafter_that_is_no_head_is_refused(wingbeat, tmp_path, drafter):
    got = wingbeat("build-engine", "--out", tmp_path, "--onnx-only", "--drafter", drafter)
    assert got.code == 2
    assert f"drafter is {drafter!r}: engines are built of EAGLE heads" in got.err


def test_a_folder_with_a_checkpoint_is_not_written_over(wingbeat, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    got = wingbeat("build-engine", "--out", tmp_path, "--dtype", "float32", "--onnx-only")
    assert got.code == 2
    assert f"out is {tmp_path}, which is a checkpoint folder" in got.err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_an_engine_directory_that_is_not_there_is_refused():
    with pytest.raises(ValidationError, match="engine_dir is '/nowhere': there is no such folder"):
        ModelOptions(engine_dir="/nowhere")


@pytest.mark.slow
@needs("inspection")
def test_a_built_directory_writes_the_text_of_the_torch_backend(wingbeat, tmp_path):
    pytest.importorskip("onnxscript")
    from tests.runtime.models import DEMO_PAIR

    model, head, engines = tmp_path / "model", tmp_path / "head", tmp_path / "engines"
    verifier = random_model("llama", num_hidden_layers=4, vocab_size=4096)
    verifier.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((DEMO_PAIR / "verifier" / name).read_bytes())
    save_eagle_head(random_head(prepare_model(verifier, "llama")), head)
    limits = ("--max-batch", 2, "--max-input-len", 64, "--max-kv", 128, "--max-verify-tree", 16, "--max-draft-tree", 16)
    pair = ("--model", model, "--drafter", head)
    got = wingbeat("build-engine", *pair, "--out", engines, "--dtype", "float32", "--onnx-only", *limits)
    assert (got.code, "ONNX files only" in got.out) == (0, True), got.err
    assert "3/3" in got.err
    assert all((engines / name).is_file() for name in ("d2t.safetensors", "tokenizer.json", "chat_template.jinja"))
    texts = []
    for options in ((), ("--engine-dir", engines)):
        command = ("generate", "def f(", *pair, "--max-tokens", 24, "--temperature", 0, "--allow-bad-drafter", "--json")
        got = wingbeat(*command, "--device", "cpu", "--max-model-len", 96, *options)
        assert got.code == 0, got.err
        texts.append(json.loads(got.out))
    assert texts[0]["token_ids"] == texts[1]["token_ids"]
    assert json.loads(wingbeat("inspect", engines, "--json").out)["base"]["builder"] is None
