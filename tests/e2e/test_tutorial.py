"""Commands of docs/tutorial.md, as a reader copies them: those of a terminal beside a server, and those without one."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.e2e.readme_commands import ROOT, commands
from tests.e2e.test_first_hour import VENV, made, model_of
from tests.optional import kept

TEXT = ROOT / "docs" / "tutorial.md"
PROGRAMS = ("pkill ",)
NOT_RUN = {
    "make serve": "test_first_hour runs it",
    ".venv/bin/wingbeat serve MODEL DRAFTER": "test_first_hour runs it",
    ".venv/bin/serve run examples/serve/demo_cpu.yaml": "test_serve_deploy deploys the file",
}
ALONE = kept({"bench": "fastest:", "doctor": "versions", "inspect": "EAGLE-3", "generate": "acceptance length"})
"""Commands that need no server, and what they print."""


def tutorial_commands() -> list[str]:
    return commands(TEXT.read_text(encoding="utf-8"), PROGRAMS)


def subcommand(command: str) -> str | None:
    """`bench` of `.venv/bin/wingbeat bench ..`."""
    words = command.split()
    return words[1] if words[0].endswith("/wingbeat") else None


def test_every_command_of_the_tutorial_is_run() -> None:
    rest = [command for command in tutorial_commands() if command not in NOT_RUN]
    others = [command for command in rest if not command.startswith(("curl ", "pkill ")) and not subcommand(command)]
    assert not others
    assert len(rest) >= 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[int]:
    yield from made(home)


def run(command: str, port: int) -> str:
    """A command's output, in the clone, from this server in place of port 8000."""
    shell = shutil.which("bash")
    assert shell is not None
    command = command.replace(".venv", str(VENV)).replace("8000", str(port))
    return subprocess.run([shell, "-c", command], cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.ray
def test_the_commands_beside_a_server_do_what_the_tutorial_says(served: int) -> None:
    texts, beside = [], [command for command in tutorial_commands() if command.startswith(("curl ", "pkill "))]
    assert sum("/chat/" in command for command in beside) == 3
    for command in beside:
        if "/metrics" in command:
            deadline = time.monotonic() + 60
            while 'state="attached"} 1.0' not in (said := run(command, served)) and time.monotonic() < deadline:
                time.sleep(1)
            assert "wingbeat_drafter_restarts_total" in said
            assert 'state="attached"} 1.0' in said
            continue
        said = run(command.replace('"smollm2"', f'"{model_of(served)}"'), served)
        if "/chat/" in command and model_of(served) == "wingbeat-demo":
            pytest.skip("the model cannot be fetched here")
        if "/chat/" in command:
            answer = json.loads(said)
            texts.append(answer["choices"][0]["message"]["content"])
            assert (answer["metrics"]["speculative_decoding"]["num_drafts"] > 0) == (len(texts) == 1)
    assert len(set(texts)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_command_without_a_server_prints_what_the_tutorial_says(name: str) -> None:
    (command,) = [command for command in tutorial_commands() if subcommand(command) == name]
    assert ALONE[name] in run(command, 8000)
