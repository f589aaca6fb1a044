"""Starts that cannot succeed: each is refused by one line that names what to change.

Settings and files are looked at before Ray starts; the engine's process says what it cannot load.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.deployments.engine_in_process import build_in_process
from tests.optional import kept
from tests.ports import free_port
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.options import UserError, build_config
from wingbeat.deployments.start_checks import preflight
from wingbeat.deployments.start_checks.tokenizer_check import check_tokenizer_file
from wingbeat.runtime.drafters.choice import FALLBACK

VOCAB, HIDDEN, LAYERS, POSITIONS = 300, 16, 2, 512
DEMO_HEAD = Path(__file__).parents[3] / "examples" / "demo_pair" / "drafter"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that starts."""
    folder = tmp_path_factory.mktemp("good")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({entry: i for i, entry in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture
def port() -> int:
    """A port nobody listens at."""
    return free_port()


def start(model: Path, port: int, **settings: Any) -> None:
    """Run the checks of `wingbeat serve` before a replica starts; the error's text is the line that it would print."""
    given = {"model": str(model), "drafter": FALLBACK.kind, "max_model_len": 256, "threads": 1} | settings
    check(build_config(AppConfig, given), port)


def check(config: AppConfig, port: int) -> None:
    """Before Ray starts, then in the engine's process and in its drafter's."""
    preflight.check(config, "127.0.0.1", port)
    build_in_process(config)


def config_fields(**fields: Any) -> Edit:
    """Change fields of config.json; None takes one out."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        merged = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> Edit:
    """Change the weights."""

    def edit(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        (folder / "model.safetensors").unlink()
        if file.endswith(".bin"):
            torch.save(held, folder / file)
        else:
            save_file(held, folder / file, metadata={"format": "pt"})

    return edit


def write(name: str, content: bytes | str) -> Edit:
    """Put other content into a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def truncate(name: str, num_bytes: int) -> Edit:
    """Keep the start of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def in_place_of(name: str, make: Edit) -> Edit:
    """Take a file away and make something else."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder)

    return edit


def pickled_code(folder: Path) -> None:
    """Weights whose unpickling would run a command."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {folder / 'was-run'}",))

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")


def nothing(folder: Path) -> None:
    """The checkpoint is good; a setting is not."""


class Bad(NamedTuple):
    """A start that fails, and words of its line."""

    edit: Edit
    says: str
    settings: Mapping[str, Any] = MappingProxyType({})


INDEX = "model.safetensors.index.json"
FOREIGN_HEAD = {"drafter": str(DEMO_HEAD)}
BAD_STARTS = {
    "no folder": Bad(shutil.rmtree, "model .* must be a directory"),
    "a file for a folder": Bad(lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "model"),
    "no config": Bad(lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is a folder": Bad(in_place_of("config.json", lambda f: (f / "config.json").mkdir()), "config.json"),
    "config is not JSON": Bad(write("config.json", '{"model_type": "llama",'), "config.json is not JSON"),
    "config is not text": Bad(write("config.json", b"\xff\xfe\x00"), "config.json is not JSON"),
    "config is a list": Bad(write("config.json", "[1]"), "config.json holds a JSON list"),
    "config nests without end": Bad(write("config.json", "[" * 100_000), "config.json is not JSON"),
    "no model_type": Bad(config_fields(model_type=None), "model_type is None"),
    "unknown model_type": Bad(config_fields(model_type="lama"), "knows no model_type 'lama'"),
    "code of its own": Bad(
        config_fields(model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}), "auto_map.* never run"
    ),
    "encoder-decoder": Bad(config_fields(model_type="t5", is_encoder_decoder=True), "encoder-decoder"),
    "no causal LM": Bad(config_fields(model_type="vit", architectures=["ViTModel"]), "ViTModel.* no causal LM"),
    "text_config is a word": Bad(config_fields(text_config="llama"), "text_config"),
    "a size is a word": Bad(config_fields(hidden_size="wide"), 'hidden_size is "wide"'),
    "a size is negative": Bad(config_fields(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "unknown activation": Bad(config_fields(hidden_act="nope"), "LlamaForCausalLM.*'nope'"),
    "unknown RoPE": Bad(config_fields(rope_parameters={"rope_type": "nope", "rope_theta": 1.0}), "Llama.*'nope'"),
    "unknown quantisation": Bad(
        config_fields(quantization_config={"quant_method": "foo"}), "quantised by 'foo', which is not"
    ),
    "quantisation is a word": Bad(config_fields(quantization_config="int4"), "quantization_config"),
    "too long a context": Bad(nothing, f"max_model_len is 4096.*{POSITIONS} positions", {"max_model_len": "4096"}),
    "no tokenizer": Bad(
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "no tokenizer in .*/model"
    ),
    "damaged tokenizer": Bad(truncate("tokenizer.json", 500), r"tokenizer\.json cannot be read"),
    "tokenizer of nothing": Bad(write("tokenizer.json", "{}"), r"tokenizer\.json cannot be read"),
    "tokenizer settings are a list": Bad(write("tokenizer_config.json", "[]"), "no tokenizer in"),
    "larger tokenizer": Bad(config_fields(vocab_size=200), r"token ids up to 255, .* embedding has 200 rows"),
    "no weights": Bad(lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "truncated weights": Bad(truncate("model.safetensors", 20_000), r"model\.safetensors is truncated or damaged"),
    "empty weights": Bad(truncate("model.safetensors", 0), r"model\.safetensors is truncated or damaged"),
    "absurd header": Bad(write("model.safetensors", b"\xff" * 7 + b"\x7f{}"), "truncated or damaged"),
    "absent shard": Bad(
        in_place_of("model.safetensors", write(INDEX, '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')),
        r"names 1\.safetensors and 1 more, which is not there",
    ),
    "index of nothing": Bad(in_place_of("model.safetensors", write(INDEX, '{"weight_map": 5}')), "weight_map"),
    "index that leads outside": Bad(
        in_place_of("model.safetensors", write(INDEX, '{"weight_map": {"a": "../../x.safetensors"}}')), "no file name"
    ),
    "missing tensor": Bad(tensors(lambda t: t.pop(Q_PROJ)), f"1 missing tensor: {Q_PROJ}"),
    "missing tensor of a pickle": Bad(
        tensors(lambda t: t.pop(Q_PROJ), "pytorch_model.bin"), f"1 missing tensor: {Q_PROJ}"
    ),
    "missing layer": Bad(config_fields(num_hidden_layers=9), r"no tensor of layer 2 \(and 6 more\)"),
    "unused layer": Bad(config_fields(num_hidden_layers=1), r"9 unexpected tensors: model\.layers\.1\."),
    "unexpected tensor": Bad(tensors(lambda t: t.update(foo=torch.zeros(3))), "1 unexpected tensor: foo"),
    "mis-shaped tensor": Bad(
        tensors(lambda t: t.update({Q_PROJ: torch.zeros(3, 3)})), rf"{Q_PROJ} has shape \[3, 3\], expected \[16, 16\]"
    ),
    "other vocabulary": Bad(
        config_fields(vocab_size=301), r"lm_head\.weight has shape \[300, 16\], expected \[301, 16\]"
    ),
    "packed weights": Bad(
        tensors(lambda t: t.update({Q_PROJ: torch.zeros(16, 16, dtype=torch.int8)})), f"{Q_PROJ} is I8"
    ),
    "pickled code": Bad(pickled_code, "holds code beside weights"),
    "damaged pickle": Bad(
        in_place_of("model.safetensors", write("pytorch_model.bin", b"\x80\x02]")), r"a \.bin file is damaged"
    ),
    "drafter that is nothing": Bad(nothing, "drafter is 'ngrm': must be 'auto'", {"drafter": "ngrm"}),
    "drafter of no module": Bad(nothing, "no module nowhere", {"drafter": "nowhere.Drafter"}),
    "drafter that is no drafter": Bad(nothing, "not a subclass", {"drafter": "collections.OrderedDict"}),
    "drafter of another verifier": Bad(nothing, "drafter .*belongs to another verifier.*4096.*300", FOREIGN_HEAD),
    "no MTP module": Bad(nothing, "has no MTP module", {"drafter": "mtp"}),
    "recording into a file": Bad(nothing, "recording_dir", {"recording_dir": __file__}),
    "recording below a file": Bad(nothing, "recording_dir", {"recording_dir": f"{__file__}/recordings"}),
    "more sequences than blocks": Bad(
        nothing, "max_num_seqs is .*lower it to 999", {"max_num_seqs": "1000", "num_kv_blocks": "1000"}
    ),
    "pool below one sequence": Bad(nothing, "kv_cache_memory_bytes is 1000:", {"kv_cache_memory_bytes": "1000"}),
    "pool beyond memory": Bad(nothing, "num_kv_blocks is .* GiB of memory are free", {"num_kv_blocks": str(2**31 - 1)}),
    "pool beyond the machine": Bad(
        nothing, "kv_cache_memory_bytes is .*: this machine has", {"kv_cache_memory_bytes": str(9 * 10**14)}
    ),
    "numbers that nobody means": Bad(nothing, "max_num_seqs.* use at most", {"max_num_seqs": str(10**9)}),
    "rounds beyond memory": Bad(
        nothing,
        "max_num_batched_tokens.* use at most",
        {"max_num_batched_tokens": str(2**48)},
    ),
    "no such engine": Bad(nothing, "nowhere:build", {"engine_factory": "nowhere:build"}),
    "ranks beyond the KV heads": Bad(
        nothing,
        "tensor_parallel_size is 2: it must divide num_key_value_heads of LlamaForCausalLM, which is 1",
        {"tensor_parallel_size": "2"},
    ),
    "no GPU": Bad(
        nothing,
        "device is 'cuda'",
        {"device": "cuda", "num_gpus_per_verifier": "1", "num_gpus_per_drafter": "1"},
    ),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster to join and no GPU, wherever the tests run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("case", kept(BAD_STARTS))
def test_a_bad_start_is_refused_by_one_line_that_says_why(
    case: str, model: Path, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = BAD_STARTS[case]
    bad.edit(model)
    with pytest.raises((UserError, ValueError, OSError), match=bad.says) as caught:
        start(model, port, **bad.settings)
    assert len(str(caught.value).splitlines()) == 1
    assert not (model / "was-run").exists()
    assert capfd.readouterr().err == ""


BAD_HEADS = {
    "missing tensor": Bad(tensors(lambda t: t.pop("norm.weight")), r"missing tensor norm\.weight"),
    "unexpected tensor": Bad(tensors(lambda t: t.update(foo=torch.zeros(1))), "unexpected tensor foo"),
    "mis-shaped tensor": Bad(tensors(lambda t: t.update({"norm.weight": torch.ones(5)})), r"norm\.weight has shape"),
    "ids outside the vocabulary": Bad(tensors(lambda t: t["d2t"].fill_(4000)), "d2t points outside"),
    "another vocabulary": Bad(config_fields(vocab_size=5000), "5000.* 4096"),
    "another width": Bad(config_fields(target_hidden_size=64), "hidden.size.64.* 160"),
    "truncated": Bad(truncate("model.safetensors", 5000), "truncated or damaged"),
    "no config": Bad(lambda folder: (folder / "config.json").unlink(), r"drafter is .* no config\.json"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", BAD_HEADS)
def test_a_head_that_does_not_fit_is_refused_before_anything_starts(case: str, tmp_path: Path, port: int) -> None:
    folder = Path(shutil.copytree(DEMO_HEAD, tmp_path / "head"))
    BAD_HEADS[case].edit(folder)
    with pytest.raises((UserError, ValueError), match=BAD_HEADS[case].says) as caught:
        check(build_config(AppConfig, {"drafter": str(folder)}), port)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["tokenizer.model", "sentencepiece.bpe.model", "tokenizer_config.json"])
def test_a_tokenizer_without_the_usual_file_is_left_to_the_router(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer in"):
        check_tokenizer_file(tmp_path, VOCAB)
    (tmp_path / name).write_text("{}")
    check_tokenizer_file(tmp_path, VOCAB)


def test_the_demo_pair_is_let_through(port: int) -> None:
    check(AppConfig(), port)


@pytest.mark.parametrize(
    "edit",
    [
        nothing,
        tensors(lambda t: None, "pytorch_model.bin"),
        tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})),
        tensors(lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(16, 32)})),
        tensors(lambda t: t.update({"mtp.fc.weight": torch.zeros(16, 32)})),
        tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ].bfloat16()})),
        lambda folder: (
            config_fields(tie_word_embeddings=True)(folder),
            tensors(lambda t: t.pop("lm_head.weight"))(folder),
        ),
    ],
    ids=["good", "pickle", "frequencies", "MTP layer", "MTP prefix", "mixed types", "tied head"],
)
def test_a_good_start_is_let_through(edit: Edit, model: Path, port: int) -> None:
    edit(model)
    start(model, port)


def test_a_folder_that_may_not_be_read_is_refused(model: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        if self.name == "config.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: Permission denied"):
        start(model, port)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["missing layer", "drafter that is nothing", "port in use"])
def test_the_command_ends_with_one_line_and_code_2(case: str, model: Path) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        used = server.getsockname()[1]
        bad = BAD_STARTS.get(case, Bad(nothing, f"port {used} on 127.0.0.1 is in use"))
        bad.edit(model)
        port = used if case == "port in use" else 1 + used % 60000
        options = {"model": model, "drafter": FALLBACK.kind, "max-model-len": 256, "port": port} | bad.settings
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        code = "from wingbeat.deployments.cli.main import main; main()"
        got = subprocess.run(
            [sys.executable, "-c", code, "serve", *arguments], capture_output=True, text=True, check=False
        )
    assert got.returncode == 2
    assert got.stdout in ("", "Checking the settings and the files\n")
    assert len(got.stderr.splitlines()) == 1
    assert got.stderr.startswith("wingbeat: ")
