"""`wingbeat extract`: its options reach the run, its end is one line, and so are its errors."""

import re
from pathlib import Path

import pytest

from wingbeat.runtime.recordings.reader import RecordingReader


@pytest.fixture
def corpus(tmp_path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(8):
        (root / f"m{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 9)
    return root


def test_options_reach_the_run_and_its_end_is_reported(wingbeat, corpus, tmp_path):
    options = "--sequences 3 --sequence-length 12 --tap-layers 1,4 --top-k 2 --threads 1 --suffixes .txt,.md"
    got = wingbeat("extract", "--output", str(tmp_path / "out"), "--corpus", str(corpus), *options.split())
    assert got.code == 0
    assert re.fullmatch(r"extract 3/3  [\d,]+ new tok/s  0:00:00 left\n", got.err)
    assert got.out.splitlines()[-1].endswith("in 1 shards")
    reader = RecordingReader(tmp_path / "out")
    assert (reader.num_sequences, reader.num_tokens) == (3, 36)
    assert (reader.spec.tap_layers, reader.spec.top_k) == ((1, 4), 2)


def test_a_bound_that_is_reached_is_said(wingbeat, corpus, tmp_path):
    options = "--sequences 3 --sequence-length 12 --threads 1 --suffixes .txt --max-bytes 100"
    got = wingbeat("extract", "--output", str(tmp_path / "out"), "--corpus", str(corpus), *options.split())
    assert got.code == 0
    assert "Stopped early" in got.err
    assert "max_bytes is 100" in got.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sequences", "3"), "wingbeat: --output is required"),
        (("--output", "x", "--model", "/nowhere"), "wingbeat: model is '/nowhere': there is no folder /nowhere"),
        (("--output", "x", "--top-k", "-1"), "wingbeat: --top-k -1: input should be greater"),
        (("--output", "x", "--bad", "1"), "wingbeat: No such option: --bad"),
    ],
)
def test_errors_are_one_line(wingbeat, args, message):
    got = wingbeat("extract", *args)
    assert got.code == 2
    assert got.err.startswith(message)
    assert got.err.count("\n") == 1


def test_help_names_the_options(wingbeat):
    got = wingbeat("extract", "--help")
    assert got.code == 0
    assert "--max-bytes" in got.out
    assert "Raises" not in got.out
