"""Fingerprints of GGUF files."""

import shutil

from tests.runtime.quantised.gguf_world import write_model
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.hub import checkpoint_folder


def test_a_fingerprint_is_of_the_file_wherever_it_lies(tmp_path):
    folder, other = tmp_path / "one", tmp_path / "other"
    file, moved = folder / "tiny.gguf", tmp_path / "moved.gguf"
    folder.mkdir()
    write_model(file, "Q8_0")
    shutil.copy(file, moved)
    other.mkdir()
    write_model(other / "tiny.gguf", "Q4_0")
    found = {checkpoint_fingerprint(path) for path in (file, checkpoint_folder(file), moved, folder)}
    assert len(found) == 1
    assert checkpoint_fingerprint(other) not in found


def test_a_fingerprint_is_of_all_parts(tmp_path):
    write_model(tmp_path / "tiny.gguf", "Q8_0", parts=2)
    before, second = checkpoint_fingerprint(tmp_path), tmp_path / "tiny-00002-of-00002.gguf"
    with second.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert checkpoint_fingerprint(tmp_path) != before
