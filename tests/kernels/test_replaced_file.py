"""A file is the old one or the new one, whoever writes it and however that ends."""

import ast
from pathlib import Path

import pytest

from wingbeat.kernels import disk_cache
from wingbeat.kernels.replaced_file import replacing

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "runtime", "cluster", "deployments")


def test_writers_at_the_same_time_have_files_of_their_own_and_the_last_one_stays(tmp_path):
    path = tmp_path / "figures.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:  # as of another container, whose process has the same id
            second.write_text("second")
        assert path.read_text() == "second"
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_raises_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_measurements_are_kept_and_recalled(tmp_path):
    disk_cache.keep(tmp_path / "own" / "times.json", {"seconds": 2})
    assert disk_cache.recall(tmp_path / "own" / "times.json", lambda fields: fields["seconds"]) == 2
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["times.json"]


def test_no_temporary_name_is_made_of_a_process_id_alone():
    """Containers that share a folder, or shared memory, have processes of equal ids."""
    found = []
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if "os.getpid()}" in text else "")):
            if isinstance(node, ast.JoinedStr):
                parts = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
                if parts == ["os.getpid()"]:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
