"""`make serve` and `make test` in an environment that is not there, is another Python's, or was left half made; what
`make serve` serves.

The Pythons are shell scripts: each writes down what pip is asked for, and none has a network.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
# A Python {version}: `-m venv` leaves a copy of it, and pip does as the file `pip` beside the checkout says.
case "$*" in
    *sys.version_info?:2*) echo {version} ;;
    *"sys.version_info <"*) exit {too_old} ;;
    *ensurepip*) exit {no_venv} ;;
    "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo "command = x -m venv $(pwd -P)/.venv" \
> .venv/pyvenv.cfg
        printf '#!/bin/sh\\n[ $1 = fetch ] && {{ . ./fetch; exit; }}\\necho serving by {version}: "$@"\\n' \
> .venv/bin/wingbeat; chmod +x .venv/bin/wingbeat ;;
    "-m pip"*) echo "{version} $*" >> pip.log; . ./pip ;;
esac
"""


class Checkout:
    """A checkout with nothing of ours but what installs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        (folder / "constraints").mkdir()
        for name in ("Makefile", ".ci/install", "pyproject.toml", "constraints/cpu.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.pip("true")
        self.fetch("true")

    def pip(self, does: str) -> None:
        (self.folder / "pip").write_text(does + "\n")

    def fetch(self, does: str) -> None:
        (self.folder / "fetch").write_text(does + "\n")

    def python(self, name: str, version: str, no_venv: bool = False) -> str:
        file = self.folder / name
        too_old = int(tuple(map(int, version.split("."))) < (3, 11))
        file.write_text(FAKE.format(version=version, too_old=too_old, no_venv=int(no_venv)))
        file.chmod(0o755)
        return str(file)

    def make(self, *arguments: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
        command, env = ["make", *arguments], self.env(python)
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    def env(self, python: str | None) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        env.pop("PYTHON", None)
        # Plain `make` finds this folder's python3 first.
        env["PATH"] = f"{self.folder}{os.pathsep}{env['PATH']}"
        return env if python is None else env | {"PYTHON": python}

    def installs(self) -> list[str]:
        log = self.folder / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.python("python3", "3.12")
    return checkout


def test_serving_installs_no_linter_and_testing_does(checkout: Checkout) -> None:
    assert "serving by 3.12" in checkout.make("serve").stdout
    assert "serving by 3.12" in checkout.make("serve").stdout
    (first,) = checkout.installs()
    assert "-e ." in first
    assert "[" not in first
    checkout.make(".venv/installed")
    assert "-e .[test" in checkout.installs()[1]
    checkout.make("serve")
    assert len(checkout.installs()) == 2


def test_a_python_too_old_is_one_line_and_another_needs_no_clean(checkout: Checkout) -> None:
    old = checkout.python("python3", "3.10")
    result = checkout.make("serve")
    first, last = result.stderr.splitlines()
    assert "Python 3.10" in first
    assert "PYTHON=python3.11" in first
    assert last.startswith("make: ***")
    assert not (checkout.folder / ".venv").exists()
    assert "serving by 3.11" in checkout.make("serve", python=checkout.python("python3.11", "3.11")).stdout
    # The default Python is asked for nothing where the environment is there.
    assert "serving by 3.11" in checkout.make("serve").stdout
    assert len(checkout.installs()) == 1
    assert "Python 3.10" in checkout.make("serve", python=old).stderr


@pytest.mark.parametrize(("name", "line"), [("python3", "venv module"), ("nowhere", "does not run")])
def test_a_python_that_makes_no_environment_is_one_line(checkout: Checkout, name: str, line: str) -> None:
    checkout.python("python3", "3.12", no_venv=True)
    result = checkout.make("serve", python=str(checkout.folder / name))
    assert line in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 2


def test_an_environment_of_an_older_python_is_made_anew(checkout: Checkout) -> None:
    assert "serving by 3.12" in checkout.make("serve").stdout
    newer = checkout.python("python3.13", "3.13")
    assert "serving by 3.13" in checkout.make("serve", python=newer).stdout
    assert "serving by 3.13" in checkout.make("serve", python=newer).stdout
    assert [line.split()[0] for line in checkout.installs()] == ["3.12", "3.13"]


@pytest.mark.parametrize("broken", ["python is gone", "folder was moved"])
def test_an_environment_that_no_longer_runs_is_made_anew(checkout: Checkout, broken: str, tmp_path: Path) -> None:
    checkout.make("serve")
    if broken == "python is gone":
        (checkout.folder / ".venv" / "bin" / "python").unlink()
    else:
        (checkout.folder / ".venv" / "pyvenv.cfg").write_text("command = x -m venv /elsewhere/.venv\n")
    assert "serving by 3.12" in checkout.make("serve").stdout
    assert len(checkout.installs()) == 2


def test_what_a_failing_pip_leaves_is_gone_on_with(checkout: Checkout) -> None:
    checkout.pip("false")
    assert "pip could not install" in checkout.make("serve").stderr
    (checkout.folder / ".venv" / "kept").touch()
    checkout.pip("true")
    assert "serving by 3.12" in checkout.make("serve").stdout
    assert (checkout.folder / ".venv" / "kept").exists()


ENDLESS = "while :; do sleep 0.05; done"


@pytest.mark.parametrize("pip", [ENDLESS, f"trap 'exit 1' INT; {ENDLESS}"], ids=["dies", "says it was interrupted"])
def test_what_an_interrupted_pip_leaves_is_made_anew(checkout: Checkout, pip: str) -> None:
    checkout.pip(f"touch .venv/half; {pip}")
    # In a session of its own, as behind a terminal: Ctrl-C reaches make, the shell and pip.
    running = subprocess.Popen(
        ["env", "--default-signal=INT", "make", "serve"],  # A shell in the background ignores it.
        cwd=checkout.folder,
        env=checkout.env(None),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not (checkout.folder / ".venv" / "half").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    running.wait(30)
    checkout.pip("true")
    assert "serving by 3.12" in checkout.make("serve").stdout
    assert not (checkout.folder / ".venv" / "half").exists()


@pytest.mark.parametrize(
    ("words", "served"),
    [((), "smollm2 --port 8000"), (("MODEL=demo",), "--port 8000"), (("MODEL=./mine", "PORT=1"), "./mine --port 1")],
)
def test_the_model_that_is_named_is_served(checkout: Checkout, words: tuple[str, ...], served: str) -> None:
    result = checkout.make("serve", *words)
    assert result.stdout == f"serving by 3.12: serve {served}\n"
    assert "in its place" not in result.stderr


def test_the_demo_is_served_where_the_model_cannot_be_fetched(checkout: Checkout) -> None:
    checkout.fetch("echo 'wingbeat: no network' >&2; false")
    result = checkout.make("serve")
    assert result.stdout == "serving by 3.12: serve --port 8000\n"
    assert result.stderr.endswith("wingbeat: no network\nThe demo pair is served in its place.\n")
    checkout.fetch("echo fetched > asked")
    checkout.make("serve", "MODEL=demo")
    assert not (checkout.folder / "asked").exists()
