"""GGUF files are served by the numbers that their weights stand for, multiplied as they lie in the file."""

import json

import numpy as np
import pytest
import torch

from tests.needs import needs
from tests.runtime.by_torch import by_torch
from tests.runtime.models import TREE, eagle_drafter, engine_config, generate, greedy, greedy_params, random_prompts
from wingbeat.deployments.cli.main import main
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import load_model

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.runtime.quantised.gguf_world import TOKENS, write_model
from wingbeat.runtime.quantised.gguf_blocks import FORMS
from wingbeat.runtime.quantised.gguf_file import read_gguf

CPU, NUM_TOKENS = torch.device("cpu"), 24
PROMPTS = random_prompts((5, 23, 11), len(TOKENS))


def served(file):
    return load_model(checkpoint_folder(file), torch.float32, CPU)


@pytest.mark.few(3)
@pytest.mark.parametrize("form", [*FORMS, "F16"])
def test_text_is_that_of_the_numbers_that_weights_stand_for(form, tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", form)
    loaded = by_torch(lambda: served(tmp_path / "tiny.gguf"))
    assert dict(loaded.model.named_parameters()).keys() == dict(meant.named_parameters()).keys()
    for name, parameter in meant.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name
    expected = greedy(meant, PROMPTS, NUM_TOKENS)[0]
    params = [greedy_params(NUM_TOKENS)] * len(PROMPTS)
    drafter = eagle_drafter(loaded, TREE)
    assert generate(loaded, engine_config(TREE), drafter, PROMPTS, params)[0] == expected


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
def test_drafters_are_lent_the_numbers_of_embedding_and_output_matrix(tied, tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", "Q8_0", tied=tied)
    target = TargetDescription.from_checkpoint(checkpoint_folder(tmp_path))
    assert torch.equal(target.embedding(), meant.get_input_embeddings().weight)
    assert torch.equal(target.lm_head(), meant.get_output_embeddings().weight)
    assert not target.tensor_files, "a trainer would read the layers of the file as plain tensors"


def test_every_exponent_of_mxfp4_is_that_of_the_package(tmp_path):
    blocks = np.random.default_rng(0).integers(0, 256, (250, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(250)
    meant = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.MXFP4))
    assert torch.equal(FORMS["MXFP4"].read(torch.from_numpy(blocks)[:, None]).dense(), meant)


def test_a_model_in_parts_is_read_whole(tmp_path):
    meant = write_model(tmp_path / "tiny.gguf", "Q4_1", parts=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"tiny-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    held = served(tmp_path).model
    assert torch.equal(dense_weight(held.lm_head), meant.lm_head.weight)
    third = tmp_path / "tiny-00003-of-00003.gguf"
    with pytest.raises(
        ModelCheckpointError, match=r"tiny-00003-of-00003.gguf is a part of a split model: give the first"
    ):
        checkpoint_folder(third)
    third.unlink()
    (tmp_path / "tiny-00001-of-00003.gguf").touch()  # what was read before is not asked
    with pytest.raises(
        ModelCheckpointError, match=r"the first of 3 parts, but tiny-00003-of-00003.gguf is missing in its folder"
    ):
        served(tmp_path)


def test_scales_that_are_no_numbers_are_named(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_model(file, "Q8_0")
    tensor = next(one for one in read_gguf(file).tensors if one.name == "blk.2.ffn_up.weight")
    begin = file.read_bytes().index(tensor.data.tobytes())
    with file.open("r+b") as opened:
        opened.seek(begin)
        opened.write(b"\x00\x7e")
    with pytest.raises(ModelCheckpointError, match=r"tensor model.layers.2.mlp.up_proj.weight or its scales hold NaN"):
        served(file)


@needs("inspection")
def test_inspect_shows_a_file(tmp_path, capsys):
    write_model(tmp_path / "tiny.gguf", "Q4_0")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "tiny.gguf"), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    numbers = sum(parameter.numel() for parameter in write_model(tmp_path / "again.gguf", "Q4_0").parameters())
    assert (found["kind"], found["parameters"]) == ("model", numbers)
    assert found["file_bytes"] == (tmp_path / "tiny.gguf").stat().st_size
    assert found["probe"]["can_be_verifier"]


def test_a_file_is_read_once_and_a_changed_one_anew(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_model(file, "Q8_0")
    folder = checkpoint_folder(file)
    assert checkpoint_folder(tmp_path) == checkpoint_folder(file) == folder
    write_model(file, "Q4_0")
    assert checkpoint_folder(file) != folder
    file.rename(tmp_path / "moved.gguf")
    moved = checkpoint_folder(tmp_path / "moved.gguf")
    assert (moved / "model.gguf").resolve() == (tmp_path / "moved.gguf").resolve()


def test_texts_are_split_and_joined_as_the_metadata_says(tmp_path):
    write_model(tmp_path / "tiny.gguf", "Q8_0")
    tokenizer = Tokenizer.load(checkpoint_folder(tmp_path))
    hello = tokenizer.encode("hello")
    assert [TOKENS[token] for token in hello] == ["hell", "o"]
    assert [TOKENS[token] for token in tokenizer.encode("a12")] == ["a", "1", "2"]
    text = "hello \u4e2d\u6587 \U0001f600 12\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [len(TOKENS) - 1]
    assert tokenizer.chat_template is not None


def cut(num_bytes):
    return lambda file: file.write_bytes(file.read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut(900), "is truncated or damaged"),
        (cut(-100), "is truncated or damaged"),
        (lambda file: file.write_bytes(b"GGML" + file.read_bytes()[4:]), "does not begin with GGUF"),
        (
            lambda file: write_model(file, "Q8_0", pre="unheard-of"),
            "tokenizer.ggml.pre = 'unheard-of', which is not supported",
        ),
    ],
    ids=["metadata cut", "weights cut", "another format", "another tokenizer"],
)
def test_what_cannot_be_read_is_refused_by_its_file(change, said, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_model(file, "Q8_0")
    change(file)
    with pytest.raises(ModelCheckpointError, match=said) as refused:
        checkpoint_folder(file)
    assert "tiny.gguf" in str(refused.value)
    assert "\n" not in str(refused.value)
