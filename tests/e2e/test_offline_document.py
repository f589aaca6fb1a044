"""The code of docs/offline.md runs: a batch in this process, a file of prompts, and Ray Data against a server."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.page_server import serving
from wingbeat.runtime.demo import demo_pair

DOCUMENT = Path(__file__).parents[2] / "docs" / "offline.md"
PROMPTS = ["import os", "def main(", "class Stack:"]
RAY_DATA_S = 300.0


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return tmp_path


def test_a_batch_and_a_file_of_prompts(in_folder: Path, capsys: pytest.CaptureFixture):
    first, second, _ = blocks()
    names: dict = {}
    exec(first.replace("MODEL", str(demo_pair().verifier)), names)
    text, reason, length = capsys.readouterr().out.rsplit(maxsplit=2)
    assert text
    assert (reason, float(length) >= 1) == ("length", True)
    exec(second, names)
    results = [json.loads(line) for line in (in_folder / "results.jsonl").read_text().splitlines()]
    assert [result["prompt"] for result in results] == PROMPTS
    expected = names["llm"].generate(PROMPTS, temperature=0, max_tokens=32, stop="\n")
    assert [result["text"] for result in results] == [result.text for result in expected]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("pandas", "pyarrow", "aiohttp"))), reason="ray[data] is not installed"
)
def test_ray_data_sends_a_file_of_prompts_to_a_server(in_folder: Path):
    *_, block = blocks()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with serving() as url:
        script = "import ray\n\nray.init(num_cpus=2, include_dashboard=False)\n" + block
        command = [sys.executable, "-c", script.replace("http://127.0.0.1:8000", url)]
        subprocess.run(command, check=True, timeout=RAY_DATA_S, env=kept)
    files = (in_folder / "results").glob("*.json")
    results = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert {result["prompt"] for result in results} == {*PROMPTS}
    assert all(result["text"] for result in results)
