"""Files of a head that are absent, truncated or of another type are refused by name, and no pickled code runs."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.heads.head_folder import edit_config, edit_tensors, load
from wingbeat.runtime.heads.files import DamagedCheckpointError, UnsafeCheckpointError
from wingbeat.runtime.heads.load import CheckpointError, is_head_folder


def test_a_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(folder)
    with pytest.raises(CheckpointError, match="not a folder"):
        load(folder / "absent")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_truncated_file_is_named(folder, name):
    if name.endswith(".bin"):
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedCheckpointError, match=re.escape(name)):
        load(folder)


class Payload:
    """An object that leaves a file behind if it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_code_in_a_pickle_is_never_run(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors | {"extra": Payload(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError, match=r"pytorch_model\.bin holds code beside weights"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_something_else_is_refused(folder):
    (folder / "model.safetensors").unlink()
    for content, message in (([1, 2], "holds a list"), ({"step": 3}, "step is a int")):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_an_absent_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"fc.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors, which is not there"):
        load(folder)


def test_a_whole_language_model_is_no_head(folder):
    edit_config(folder, drop=("eagle_config", "architectures"))
    edit_tensors(folder, lambda tensors: [tensors.update({f"model.{k}": tensors.pop(k)}) for k in list(tensors)])
    assert not is_head_folder(folder)
    with pytest.raises(CheckpointError, match="no EAGLE head"):
        load(folder)
