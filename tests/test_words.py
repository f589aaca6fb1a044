"""Limits of the repository's prose: lengths of documents, first words of docstrings and comments, links of the site."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional import FEATURES, is_deleted
from tests.words import ROOT, badly_begun, documents, num_words

MOST_WORDS, MOST_README_WORDS = 40_000, 1_200


def test_the_manual_is_short() -> None:
    assert sum(map(num_words, documents())) <= MOST_WORDS
    assert num_words(ROOT / "README.md") <= MOST_README_WORDS


def test_docstrings_and_comments_begin_with_their_subject() -> None:
    assert not [f"{passage.place}: {passage.text[:60]}" for passage in badly_begun()]


def test_the_site_is_built_and_no_link_of_it_is_dead(tmp_path: Path) -> None:
    if any(is_deleted(feature) for feature in FEATURES.values()):
        pytest.skip("documents link those of features that are deleted")
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "max_num_seqs" in (tmp_path / "settings.html").read_text()
    assert "wingbeat bench" in (tmp_path / "cli.html").read_text()
    assert "Engine.step" in (tmp_path / "api.html").read_text()
