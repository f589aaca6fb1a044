"""Files of prefixes are read as they were written, or refused by one line and computed again."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.runtime.models import random_model, reference
from tests.runtime.prefix_world import Kept, finish, prefix_of, warnings_of
from wingbeat.runtime.prefixes.prefix_files import PrefixFileError, read_contents, read_record, write_record
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.verifier.checkpoints.digests import tokenizer_digest, weights_digest

TOKENS = list(range(5, 47))


@pytest.fixture
def folder(tmp_path):
    """With one prefix of the tiny Llama."""
    one = Kept(reference("llama").loaded, tmp_path / "kept")
    one.save(prefix_of(TOKENS))
    one.close()
    return tmp_path / "kept"


def rewrite(path, change_tensors=lambda tensors: None, change_metadata=lambda metadata: None):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change_tensors(tensors)
    change_metadata(metadata)
    save_file(tensors, path, metadata=metadata)


def flip(tensors):
    tensors["layers.0.keys"][3, 0, 0] += 1


def cut(tensors):
    tensors["layers.0.keys"] = tensors["layers.0.keys"][:-1].contiguous()


DAMAGES = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "no safetensors": (lambda path: path.write_bytes(b"x" * 1000), "cannot be read"),
    "another number": (lambda path: rewrite(path, flip), "is damaged: its checksum does not match"),
    "another shape": (lambda path: rewrite(path, cut), "is damaged: its checksum does not match"),
    "no metadata": (lambda path: save_file(load_file(path), path), "is not of format 1"),
    "a later format": (lambda path: rewrite(path, change_metadata=lambda m: m.update(format="2")), "not of format 1"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_one_line_and_computed_from_its_tokens(folder, caplog, damage):
    spoil, reason = DAMAGES[damage]
    spoil(folder / "system.safetensors")
    one = Kept(reference("llama").loaded, folder)
    one.keeper.open()
    (line,) = warnings_of(caplog)
    assert line.startswith("Prefix system is computed from its tokens: ")
    assert reason in line
    assert one.names == []
    finish(one.engine, one.keeper)
    assert one.names == ["system"]
    assert one.run([[*TOKENS, 1]], 2)[1] == [40]
    one.close()


@pytest.mark.parametrize(
    ("field", "value"), [("weights", "w2"), ("dtype", "bfloat16"), ("block_size", "8"), ("version", "another")]
)
def test_a_file_of_another_model_is_computed_again_and_written_anew(folder, caplog, field, value):
    for expected in ([f"has another {field}"], []):
        caplog.clear()
        one = Kept(reference("llama").loaded, folder, identity={field: value})
        one.keeper.open()
        finish(one.engine, one.keeper)
        assert one.names == ["system"]
        one.close()
        lines = warnings_of(caplog)
        assert len(lines) == len(expected)
        assert all(reason in line for reason, line in zip(expected, lines, strict=True))


def test_tensors_of_another_shape_are_not_read_whatever_the_file_says_of_them(folder, caplog):
    from wingbeat.runtime.verifier.loading.loader import prepare_model

    other = prepare_model(random_model("llama", num_key_value_heads=4), "other")
    one = Kept(other, folder)
    one.keeper.open()
    (line,) = warnings_of(caplog)
    assert "layers.0.keys is [40, 2, 16] of torch.float32, not [40, 4, 16] of torch.float32" in line
    one.close()


def test_contents_of_other_tokens_or_another_adapter_are_refused(folder):
    identity = {"weights": "w1", "dtype": "float32", "block_size": "4"}
    path = folder / "system.safetensors"
    assert read_contents(path, prefix_of(TOKENS), identity)
    for other in (prefix_of(TOKENS[1:]), prefix_of(TOKENS, variant=Variant("sql", "/a", "d1"))):
        with pytest.raises(PrefixFileError, match="has another prefix"):
            read_contents(path, other, identity)


def test_a_record_is_read_as_it_was_written(tmp_path):
    prefix = SavedPrefix("a.b-c", 7, (1, 2), Variant("sql", "/a", "d1"), '{"messages": []}')
    write_record(tmp_path / "a.b-c.json", prefix, "t1")
    assert read_record(tmp_path / "a.b-c.json", "t1") == prefix
    assert (tmp_path / "a.b-c.json").stat().st_mode & 0o777 == 0o600


def change_token(path):
    path.write_text(path.read_text().replace('"token_ids": [5, ', '"token_ids": [6, '))


def rename(path):
    fields = json.loads(path.read_text())
    assert fields["name"] == "system"
    path.rename(path.with_name("other.json"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change_token, "is damaged: its checksum does not match"),
        (lambda path: path.write_text("[]"), "is not of format 1"),
        (lambda path: path.write_text("{"), "cannot be read: JSONDecodeError"),
        (rename, "holds a prefix named 'system'"),
    ],
)
def test_a_damaged_record_is_left_out_by_one_line(folder, caplog, spoil, reason):
    spoil(folder / "system.json")
    one = Kept(reference("llama").loaded, folder)
    assert one.keeper.open() == []
    (line,) = warnings_of(caplog)
    assert line.startswith("A saved prefix is left out: ")
    assert reason in line
    one.close()


def test_prefixes_of_another_tokenizer_are_left_out(folder, caplog):
    one = Kept(reference("llama").loaded, folder, identity={"tokenizer": "t2"})
    assert one.keeper.open() == []
    assert "has tokens of another tokenizer" in warnings_of(caplog)[0]
    one.close()


def test_files_are_the_users_own_and_leave_with_their_prefix(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["system.json", "system.safetensors"]
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600, 0o600]
    one = Kept(reference("llama").loaded, folder)
    one.keeper.open()
    one.keeper.keep([("system", 0, None)]).result(10)
    assert len(list(folder.iterdir())) == 2
    one.keeper.keep([("system", 2, None)]).result(10)
    assert list(folder.iterdir()) == []
    one.close()


def test_a_disk_that_refuses_costs_the_file_and_not_the_prefix(tmp_path, caplog):
    (tmp_path / "kept").write_text("no folder")
    one = Kept(reference("llama").loaded, tmp_path / "kept")
    one.save(prefix_of(TOKENS))
    assert one.keeper.describe()["prefixes"][0]["saved"] is None
    assert "Prefix system cannot be kept in" in warnings_of(caplog)[0]
    one.close()


def test_the_digest_of_weights_is_over_every_byte(tmp_path):
    save_file({"a": torch.zeros(4096)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("1")
    before = weights_digest(tmp_path), tokenizer_digest(tmp_path)
    assert weights_digest(tmp_path) == before[0]
    tensor = torch.zeros(4096)
    tensor[2000] = 1
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != before[0]
    (tmp_path / "tokenizer.json").write_text("2")
    assert tokenizer_digest(tmp_path) != before[1]
