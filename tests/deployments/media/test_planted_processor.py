"""A processor whose folder contains code."""

from pathlib import Path

from tests.deployments.cli.test_planted_code import check_refused, trace  # noqa: F401 - a fixture
from wingbeat.runtime.media.processor import load_processor


def test_a_processor_that_needs_its_own_code_is_refused(tmp_path: Path, trace: Path):  # noqa: F811
    check_refused(lambda folder: load_processor(folder, None, "image"), tmp_path, trace)
