"""Output of the command line; errors are one line with exit code 2."""

import subprocess
import sys

import pytest

from wingbeat.runtime.demo import demo_pair


@pytest.mark.few(10)
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
        ("generate", "PROMPT"),
        ("generate hi --prompt-ids 1", "PROMPT"),
        ("generate hi --top-p 2", "--top-p 2"),
        ("generate hi --temperature nan", "--temperature"),
        ("generate hi --max-tokens 0", "--max-tokens 0"),
        ("generate hi --max-tokens many", "--max-tokens many"),
        ("generate hi --seed 9223372036854775808", "--seed"),
        ("generate --prompt-ids 1,x", "--prompt-ids x"),
        ("generate --prompt-ids 1,-2", "--prompt-ids"),
        ("generate hi --model /nowhere", "/nowhere"),
        ("generate hi --drafter nonsense", "nonsense"),
        ("generate hi --draft-steps 0", "draft_steps is 0"),
        ("generate hi --dtype int4", "--dtype int4"),
        ("generate hi --wings 2", "--wings"),
        ("generate hi there", "there"),
        ("generate hi --stop=", "--stop"),
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
