"""Engine directories: what they hold is what was exported, and errors name file and field."""

import json

import pytest
import torch

from tests.runtime.models import prepare_model, random_head, random_model
from tests.runtime.tensorrt.engine_world import base_config, draft_config
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.tensorrt import engine_directory
from wingbeat.runtime.tensorrt.backend import engine_limits
from wingbeat.runtime.tensorrt.builders import EngineBuilder
from wingbeat.runtime.tensorrt.engine_config import EngineDirectoryError
from wingbeat.runtime.tensorrt.engine_directory import (
    EngineDirectory,
    file_digest,
    write_config,
    write_draft_to_target,
)
from wingbeat.runtime.tensorrt.session import EngineLoadError


@pytest.fixture(scope="module")
def llama():
    return prepare_model(random_model("llama", num_hidden_layers=4), "llama")


@pytest.fixture
def folder(llama, tmp_path):
    head = random_head(llama, draft_vocab_size=40)
    for name in ("eagle_base.onnx", "eagle_draft.onnx"):
        (tmp_path / name).write_text(name)
    files = {name: {name: file_digest(tmp_path / name)} for name in ("eagle_base.onnx", "eagle_draft.onnx")}
    base = base_config(llama, head.tap_layers).model_copy(update={"files": files["eagle_base.onnx"]})
    write_config(tmp_path, base)
    write_config(tmp_path, draft_config(head).model_copy(update={"files": files["eagle_draft.onnx"]}))
    write_draft_to_target(tmp_path, head.draft_token_ids)
    return tmp_path


def rewrite(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_directory_reads_as_it_was_written(folder, llama):
    directory = EngineDirectory(folder)
    directory.check_files()
    assert directory.base.hidden_size == llama.hidden_size
    assert directory.draft.draft_vocab_size == 40
    assert directory.draft_token_ids().tolist() == (torch.arange(40) * 2).tolist()


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("base_config.json", {"vocab_size": "many"}, r"base_config\.json: vocab_size: input should be a valid integer"),
        ("base_config.json", {"colour": 1}, r"base_config\.json: colour: extra inputs are not permitted"),
        ("base_config.json", {"format_version": 2}, r"base_config\.json: format_version: input should be 4"),
        ("draft_config.json", {"format_version": 2}, r"draft_config\.json: format_version: input should be 4"),
        (
            "draft_config.json",
            {"num_axes": 3},
            r"draft_config\.json: num_axes is 3, media of base_config",
        ),
        ("draft_config.json", {"media_width": 64}, r"draft_config\.json: media_width is 64, media of base_config"),
        ("base_config.json", {"tap_layers": [1, 99]}, r"base_config\.json: fields: tap_layers is \(1, 99\): there are"),
        ("base_config.json", {"layers": []}, r"base_config\.json: fields: layers has 0 entries"),
        (
            "draft_config.json",
            {"base_fingerprint": "1"},
            r"draft_config\.json: base_fingerprint is 1, base_config\.json",
        ),
        ("draft_config.json", {"tap_layers": [1]}, r"draft_config\.json: tap_layers is \(1,\)"),
        ("draft_config.json", {"head_dim": 0}, r"draft_config\.json: head_dim: input should be greater than"),
    ],
)
def test_errors_name_file_and_field(folder, file, fields, message):
    rewrite(folder / file, **fields)
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory(folder)


def test_a_changed_or_missing_file_is_named(folder):
    directory = EngineDirectory(folder)
    (folder / "eagle_draft.onnx").write_text("another")
    with pytest.raises(EngineDirectoryError, match=r"eagle_draft\.onnx differs from the digest in draft_config\.json"):
        directory.check_files()
    (folder / "eagle_base.onnx").unlink()
    with pytest.raises(EngineDirectoryError, match=r"eagle_base\.onnx is missing"):
        directory.check_files()


def test_a_folder_without_configs_is_none(tmp_path):
    with pytest.raises(EngineDirectoryError, match=r"holds no base_config\.json"):
        EngineDirectory(tmp_path)


def test_without_cached_prefixes_limits_become_one_block_a_sequence(llama):
    config = base_config(llama, ())
    limits = engine_limits(EngineConfig(max_num_seqs=3, max_model_len=200, enable_prefix_caching=False), config)
    assert (limits.max_blocks_per_seq, limits.num_kv_blocks, limits.block_size) == (1, 4, config.limits.capacity)
    paged = engine_limits(EngineConfig(max_num_seqs=3, max_model_len=200), config)
    assert (paged.block_size, paged.num_kv_blocks) == (16, 3 * paged.max_blocks_per_seq + 1)
    assert engine_limits(EngineConfig(max_num_seqs=3, max_model_len=200, num_kv_blocks=40), config).num_kv_blocks == 40
    lowered = engine_limits(EngineConfig(max_model_len=4000, lower_max_model_len=True), config)
    assert lowered.max_model_len == config.limits.max_kv_cache_capacity


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (EngineConfig(max_model_len=300), "max_model_len is 300: the engine was built with max_kv_cache_capacity 256"),
        (EngineConfig(max_model_len=64, cuda_graphs=True), "cuda_graphs is True"),
        (
            EngineConfig(max_model_len=64, speculation=SpeculationConfig(verify_tree_size=17)),
            "verify_tree_size is 17: the engine was built with max_verify_tree_size 16",
        ),
    ],
)
def test_what_the_engine_was_not_built_for_is_refused(llama, limits, message):
    with pytest.raises(ValueError, match=message):
        engine_limits(limits, base_config(llama, ()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opset": 24}, r"eagle_base\.engine: tensorrt-rtx 1\.7 built it, and 1\.8 is installed"),
        ({"opset": 18}, r"eagle_base\.engine: opset is 18: engines need opset 24 to write KV"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused_before_it_is_read(folder, monkeypatch, fields, message):
    (folder / "eagle_base.engine").write_text("built elsewhere")
    rewrite(folder / "base_config.json", builder="tensorrt-rtx", tools={"tensorrt-rtx": "1.7"}, **fields)
    monkeypatch.setattr(engine_directory, "find_builder", lambda name: EngineBuilder(name, None, "1.8"))
    with pytest.raises(EngineLoadError, match=message):
        EngineDirectory(folder).open_session("eagle_base", torch.device("cuda"))
