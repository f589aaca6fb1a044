"""Recognises folders that are not a language model's checkpoint, and describes what to give instead.

The module uses only names of files and tensors, and imports no torch.
"""

from collections.abc import Collection
from pathlib import Path

from wingbeat.runtime.parts import first_result, hooks

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_GGUF = "GGUF files are not read: give the folder of the safetensors checkpoint that it was made from"
_HEAD_PARTS = ("midlayer.", "d2t", "t2d", "fc.weight", "candidate_selector.", "markov_head.", "encoder.fc.")
"""Prefixes of tensor names that no language model has. Layer names cannot identify a head, because a whole model may be
saved without its name prefix.
"""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Names of vocabulary files; a tokenizer needs at least one such file."""
_LFS = b"version https://git-lfs"


def folder_problem(folder: str | Path) -> str | None:
    """Returns the problem that the file names of a checkpoint folder show; None if there is none.

    Returns None for a folder with a config.json, and for the name of a published model, which is resolved elsewhere.
    """
    folder = Path(folder)
    if first_result("named_model", folder) is not None:
        return None
    if not folder.exists():
        meant = first_result("meant_name", folder)
        return f"there is no folder {folder}" + ("" if meant is None else f" (did you mean {meant}?)")
    if not folder.is_dir():
        return _file_problem(folder)
    return None if (folder / "config.json").is_file() else _without_config(folder)


def head_problem(folder: Path, names: Collection[str]) -> str | None:
    """Returns a problem if `names`, the tensor names of a verifier's folder, are those of a draft head; else None."""
    plain = [name.removeprefix("model.") for name in names]
    if not any(name.startswith(_HEAD_PARTS) for name in plain):
        return None
    return f"{folder} is a draft head, not a language model: give it as the drafter, and its verifier as the model"


def pointer_problem(file: Path) -> str | None:
    """Returns a problem if a file is a git-lfs pointer instead of the real file, else None."""
    try:
        with file.open("rb") as opened:
            if not opened.read(len(_LFS)).startswith(_LFS):
                return None
    except OSError:
        return None
    return f"{file} is a pointer of git-lfs and not the file itself: run `git lfs pull` in its folder"


def gguf_problem(file: Path) -> str | None:
    """Returns the problem that the first bytes of a GGUF file show; None if the file can be read."""
    if not hooks("folder_of"):
        return f"{file} is a GGUF file; {_GGUF}"
    with file.open("rb") as opened:
        if opened.read(4) == b"GGUF":
            return None
    return pointer_problem(file) or f"{file} is damaged or not a GGUF file: it does not begin with GGUF"


def _file_problem(file: Path) -> str:
    if file.suffix == ".gguf":
        return gguf_problem(file)
    if file.suffix in (*_WEIGHTS, ".json"):
        return f"{file} is a file: give its folder"
    return f"{file} is a file: give the folder of a Hugging Face checkpoint"


def _without_config(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir())
    if not found:
        return f"folder {folder} is empty"
    lacks = f"folder {folder} has no config.json"
    if (other := first_result("other_folder", folder)) is not None:
        return f"{lacks} but {other}"
    if "model_index.json" in found:
        return f"{lacks} but a model_index.json: pipelines of diffusers are no language models"
    gguf_files = [name for name in found if name.endswith(".gguf")]
    if gguf_files and hooks("folder_of"):
        if len(gguf_files) > 1:
            return f"{lacks} but {len(gguf_files)} GGUF files: give one of them"
        return gguf_problem(folder / gguf_files[0])
    if gguf_files:
        return f"{lacks} but {gguf_files[0]}; {_GGUF}"
    if "params.json" in found:
        return f"{lacks} but a params.json: convert it to the form of transformers, or fetch the repository that has it"
    inner = sorted(path.parent for path in folder.glob("*/config.json")) or sorted(
        path.parent for path in folder.glob("snapshots/*/config.json")
    )
    return f"{lacks}; {inner[0]} has one: give that folder" if inner else lacks
