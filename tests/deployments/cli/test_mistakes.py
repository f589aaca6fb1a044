"""Mistakes of new users: each error is a line that names the field or file and the correction.

Commands run in this process up to where they would start Ray or compute.
"""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.deployments.engine_in_process import build_in_process
from tests.needs import needs
from tests.optional import kept
from tests.runtime.models import DEMO_PAIR
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import SamplingParams

HEAD, VERIFIER = DEMO_PAIR / "drafter", DEMO_PAIR / "verifier"


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def only(**files: str) -> Callable[[Path], None]:
    """Nothing but these files."""

    def write(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return write


def field(**fields: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **fields)


def shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lfs(name: str) -> Callable[[Path], None]:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n"
    return lambda folder: (folder / name).write_text(text) and None


def huge(folder: Path) -> None:
    """A header that promises more than any file holds."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")


GENERATE = "generate hi --model {model} --drafter none --max-tokens 2"
SERVE = "serve {model} --drafter none"
FOLDERS: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
    "empty": (only(), GENERATE, ("is empty", "config.json")),
    "gguf alone": (only(model__gguf="GGUF"), SERVE, ("model.gguf", "is truncated or damaged")),
    "adapter": (
        only(adapter_config__json='{"base_model_name_or_path": "org/base"}'),
        SERVE,
        ("adapter_config.json", "org/base", "--lora-modules"),
    ),
    "diffusers": (only(model_index__json="{}"), GENERATE, ("model_index.json", "no language models")),
    "other format": (only(params__json="{}"), GENERATE, ("params.json", "convert it")),
    "config that is no JSON": (only(config__json="{,}"), SERVE, ("config.json is not JSON",)),
    "config pointer": (lfs("config.json"), GENERATE, ("git-lfs", "git lfs pull")),
    "weights pointer": (lfs("model.safetensors"), SERVE, ("git-lfs", "git lfs pull")),
    "tokenizer pointer": (lfs("tokenizer.json"), SERVE, ("tokenizer.json", "git lfs pull")),
    "no weights": (without("model.safetensors"), GENERATE, ("neither model.safetensors nor pytorch_model.bin",)),
    "absent shard": (shards, SERVE, ("model-00001-of-00002.safetensors", "not there")),
    "cut weights": (cut, SERVE, ("model.safetensors is truncated or damaged",)),
    "huge header": (huge, GENERATE, ("model.safetensors is truncated or damaged",)),
    "NaN": (nan, GENERATE, ("model.norm.weight holds NaN",)),
    "no tokenizer": (without("tokenizer.json"), SERVE, ("no tokenizer in", "copy the files")),
    "no tokenizer for a text": (
        without("tokenizer.json", "tokenizer_config.json"),
        GENERATE,
        ("no tokenizer", "--prompt-ids"),
    ),
    "unknown type": (field(model_type="novel"), GENERATE, ("knows no model_type 'novel'",)),
    "encoder": (field(model_type="t5", is_encoder_decoder=True), SERVE, ("encoder-decoder",)),
    "no causal LM": (field(model_type="vit", architectures=["ViTModel"]), GENERATE, ("ViTModel", "no causal LM")),
    "a field of the wrong kind": (field(hidden_size="wide"), SERVE, ("hidden_size", '"wide"', "whole number")),
    "an unknown dtype": (field(torch_dtype="float7"), SERVE, ("torch_dtype", "float7", "bfloat16")),
    "other sizes": (field(intermediate_size=96), GENERATE, ("mlp", "expected")),
    "unknown quantisation": (field(quantization_config={"quant_method": "novel"}), SERVE, ("'novel'", "gptq")),
}
LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no such folder": ("generate hi --model /no/such", ("/no/such", "there is no folder")),
    "a file": ("serve {model}/config.json", ("config.json is a file", "give its folder")),
    "a head as the model": ("generate hi --model {head}", ("is a draft head", "give it as the drafter")),
    "model and head swapped": ("serve {head} {model}", ("is a draft head", "its verifier as the model")),
    "a head of another model": ("generate hi --model {model} --drafter {head}", ("belongs to another verifier",)),
    "a name that is not here": ("serve some-org/no-such-model", ("some-org/no-such-model", "HF_HUB_OFFLINE")),
    "a drafter that is nothing": ("generate hi --model {model} --drafter eagel", ("drafter", "eagel", "'none'")),
    "mtp that is not there": ("serve {model} mtp", ("drafter is 'mtp'", "no MTP module")),
    "a GPU": ("generate hi --model {model} --device cuda", ("--device cuda", "--device cpu")),
    "a GPU to inspect": ("inspect {model} --device cuda", ("--device cuda", "--device cpu")),
    "a numbered GPU": ("generate hi --model {model} --device cuda:7", ("--device cuda:7", "'cuda'")),
    "an unknown dtype": ("serve {model} --dtype fp7", ("--dtype", "fp7", "bfloat16")),
    "a misspelt option": ("serve {model} --max-modle-len 64", ("--max-modle-len", "--max-model-len")),
    "a misspelt command": ("server {model}", ("server", "serve")),
    "a word too many": ("serve {model} none more", ("more",)),
    "text for a number": ("serve {model} --max-num-seqs many", ("--max-num-seqs", "many", "integer")),
    "longer than the model": ("serve {model} --max-model-len 9999", ("max_model_len", "9999", "512 positions")),
    "prompt and answer too long": (
        "generate hi --model {model} --drafter none --max-tokens 600",
        ("--max-tokens 600", "context of 512"),
    ),
    "two prompts": ("generate hi --prompt-ids 1,2 --model {model}", ("PROMPT", "--prompt-ids")),
    "memory that is not here": ("serve {model} none --kv-cache-memory-bytes 1000000000000000", ("memory",)),
    "a port that is taken": ("serve {model} none --port {port}", ("{port}", "--port")),
    "no port": ("serve {model} --port 99999", ("--port", "65535")),
    "a host that is none": ("serve {model} none --host no.such.host.invalid", ("no.such.host.invalid",)),
    "an address that is none": ("serve {model} none --address http://here:1", ("--address", "HOST:PORT")),
    "half of JSON": ("serve {model} --lora-modules {{", ("--lora-modules", "property name")),
    "an adapter that is none": ('serve {model} --lora-modules {{"a":"{model}"}}', ("lora_modules", "adapter")),
    "enforce_eager": ("generate hi --enforce-eager", ("--enforce-eager: vLLM's option, here ",)),
    "trusting code": ("serve {model} --trust-remote-code", ("never run",)),
    "a file of prompts that is not there": ("bench --model {model} --prompts /no/such", ("--prompts", "/no/such")),
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SimpleNamespace]:
    """A command line; an engine is started in this process in the place of Ray."""
    from wingbeat.deployments import launch

    def start(config: AppConfig, *args: object) -> None:
        try:
            build_in_process(config)
        except (ValueError, OSError) as error:
            raise launch.StartError(str(error)) from None
        raise AssertionError("it would have started")

    monkeypatch.setattr(launch, "serve_until_stopped", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(line: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            cli.main(line.split())
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, lines=captured.err.splitlines(), out=captured.out)

    return run


def assert_one_line(got: SimpleNamespace, words: tuple[str, ...]) -> None:
    """The last line, behind those of a start's progress, is the only one that complains."""
    assert got.code == 2
    complaints = [line for line in got.lines if not line.startswith(("[", " "))]
    (line,) = [line for line in complaints if line.startswith("wingbeat: ")]
    assert complaints == [line], got.lines
    assert len(line) < 600
    for word in words:
        assert word in line, line
    assert "Traceback" not in line
    assert "Error:" not in line.removeprefix("wingbeat: ").split(": ")[0]


@pytest.mark.few(10)
@pytest.mark.parametrize("mistake", kept(FOLDERS))
def test_a_folder_that_is_wrong(mistake: str, tiny_model: Path, tmp_path: Path, run):
    change, command, words = FOLDERS[mistake]
    shutil.copytree(tiny_model, tmp_path / "model")
    change(tmp_path / "model")
    assert_one_line(run(command.format(model=tmp_path / "model")), words)


@pytest.mark.few(14)
@pytest.mark.parametrize("mistake", kept(LINES))
def test_a_command_line_that_is_wrong(mistake: str, tiny_model: Path, port: int, run):
    command, words = LINES[mistake]
    places = {"model": tiny_model, "head": HEAD, "verifier": VERIFIER, "port": port}
    assert_one_line(run(command.format(**places)), tuple(word.format(**places) for word in words))


MEANT: dict[str, dict[str, object]] = {
    "dtype with its package": {"torch_dtype": "torch.float32"},
    "dtype in short": {"dtype": "FP32"},
    "numbers as text": {"hidden_size": "64", "num_hidden_layers": "2", "rms_norm_eps": "1e-6", "vocab_size": "257"},
    "floats": {"hidden_size": 64.0, "num_attention_heads": 4.0, "max_position_embeddings": "512.0"},
    "booleans as text": {"tie_word_embeddings": "false", "attention_bias": "False", "use_cache": "True"},
    "booleans as numbers": {"tie_word_embeddings": 0, "attention_bias": 0},
    "whole numbers for floats": {"initializer_range": 1, "attention_dropout": "0"},
    "nothing as text": {"pad_token_id": "null", "head_dim": "None"},
    "ids as text": {"eos_token_id": ["0"], "bos_token_id": "1"},
    "an attention that is not installed": {"attn_implementation": "flash_attention_2"},
    "the same by its inner name": {"_attn_implementation": "flash_attention_3", "use_flash_attention_2": True},
    "a kernel of the hub": {
        "attn_implementation": "kernels-community/flash-attn",
        "experts_implementation": "deepgemm",
    },
}


@pytest.mark.few(4)
@needs("config_values")
@pytest.mark.parametrize("spelling", MEANT)
def test_fields_that_are_clear_are_read_as_they_were_meant(spelling: str, tiny_model: Path, tmp_path: Path):
    shutil.copytree(tiny_model, tmp_path / "model")
    edit(tmp_path / "model" / "config.json", **MEANT[spelling])
    assert written(tmp_path / "model") == written(tiny_model)


def written(folder: Path) -> list[int]:
    """Eight tokens, greedily."""
    llm = LLM(folder, "none", EngineConfig(max_num_seqs=1, max_model_len=64, num_kv_blocks=64), InProcessChannel)
    (got,) = llm.generate([[40, 41, 42]], [SamplingParams(max_tokens=8, temperature=0.0)])
    return got.token_ids


@pytest.mark.parametrize("dtype", ["fp32", "float", "torch.float32", "bf16", "BFloat16", "half", "fp16"])
def test_dtypes_have_their_usual_names(dtype: str, tiny_model: Path):
    assert ModelOptions(model=tiny_model, dtype=dtype).dtype in ("float32", "bfloat16", "float16")


def test_there_are_as_many_as_a_first_hour_has():
    assert len(FOLDERS) + len(LINES) >= 40
    assert os.environ["HF_HUB_OFFLINE"] == "1"
