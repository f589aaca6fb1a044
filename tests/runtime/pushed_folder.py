"""Folders as a trainer pushes them: the demo's verifier by other weights, and what does not fit it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from wingbeat.runtime.demo import demo_pair

FILE = "model.safetensors"


def pushed_folder(folder: Path, source: Path | None = None, seed: int = 1, std: float = 0.05) -> Path:
    """The demo's verifier, or that of another folder, with noise on its weights."""
    shutil.copytree(source or demo_pair().verifier, folder)
    noise = torch.Generator().manual_seed(seed)
    rewrite(
        folder, {n: t + std * torch.randn(t.shape, generator=noise).to(t.dtype) for n, t in tensors(folder).items()}
    )
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


def rewrite(folder: Path, held: dict[str, torch.Tensor]) -> None:
    save_file(held, folder / FILE, {"format": "pt"})


def edit(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without_a_tensor(folder: Path) -> None:
    rewrite(folder, dict(sorted(tensors(folder).items())[:-1]))


def of_another_shape(folder: Path) -> None:
    held = tensors(folder)
    name = next(name for name in held if name.endswith("down_proj.weight"))
    rewrite(folder, held | {name: held[name][:, :-1].contiguous()})


def as_pickles(folder: Path) -> None:
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


BAD = {
    "another size": (lambda f: edit(f, "config.json", intermediate_size=12), "intermediate_size is 12, that of the"),
    "another activation": (lambda f: edit(f, "config.json", hidden_act="relu"), "hidden_act is 'relu', that of the"),
    "a tensor less": (without_a_tensor, "1 missing tensor"),
    "another shape": (of_another_shape, "has shape"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has another tokenizer than"),
    "another end": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[0, 3]),
        r"ends texts with the tokens \[0, 3",
    ),
    "half a file": (lambda f: os.truncate(f / FILE, 1000), "truncated or damaged"),
    "no weights": (lambda f: (f / FILE).unlink(), "has neither model.safetensors nor"),
    "pickles": (as_pickles, "holds pickles"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
}
"""Changes of a folder, and words of its refusal."""
