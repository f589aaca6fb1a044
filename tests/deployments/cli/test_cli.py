"""Output of the command line; errors are one line with exit code 2."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from wingbeat.deployments.cli import main as cli
from wingbeat.runtime.demo import demo_pair


@pytest.fixture
def wingbeat(capsys):
    """Run the command; returns exit code, stdout and stderr."""

    def run(*args: str):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(args))
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)

    return run


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("serve --num-replicas 0", "--num-replicas 0"),
        ("serve --port 99999", "--port"),
        ("serve --model /nowhere", "/nowhere"),
        ("train drafter --verifier v", "--output"),
        ("train drafter --verifier v --output out --corpus /nowhere", "/nowhere"),
        ("train drafter --output out", "--verifier"),
        (
            "train drafter --verifier v --output out --family dspark --layout specforge",
            "family='dspark' does not have this setting",
        ),
        (
            "train drafter --verifier v --output out --family dflash --pair-rank 8",
            "family='dflash' does not have this setting",
        ),
        (
            "train drafter --verifier v --output out --family p-eagle --ttt-steps 3",
            "family='p-eagle' does not have this setting",
        ),
        ("train drafter --verifier v --output out --family medusa", "--family"),
        ("train wings", "wings"),
        ("fly", "fly"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(wingbeat, command, hint):
    got = wingbeat(*command.split())
    assert (got.code, got.out) == (2, "")
    assert got.err.count("\n") == 1
    assert hint in got.err


@pytest.mark.parametrize("command", [[], ["--help"], ["serve", "--help"]])
def test_help_is_no_error(wingbeat, command):
    got = wingbeat(*command)
    assert got.code == 0
    assert "Usage: wingbeat" in got.out


@pytest.mark.slow
def test_help_does_not_wait_for_torch():
    code = "import sys; import wingbeat.deployments.cli.main; print('torch' in sys.modules, 'ray' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["False", "False"]


def test_a_missing_demo_pair_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="--model DIR"):
        demo_pair(tmp_path)


def test_the_demo_pair_is_verifier_and_drafter(tmp_path):
    for name in ("verifier", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert demo_pair(tmp_path) == (tmp_path / "verifier", tmp_path / "drafter")
