"""Help of every command: each setting is shown, and nothing heavy is imported for it."""

import json
import re
import subprocess
import sys

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.main import _app as main_app
from wingbeat.deployments.cli.options import option_name

HEAVY = ("torch", "transformers", "ray", "numpy", "fastapi", "uvicorn", "xgrammar", "matplotlib")
APP = main_app()
GROUPS = {
    group.name: [command.name or command.callback.__name__ for command in group.typer_instance.registered_commands]
    for group in APP.registered_groups
}
COMMANDS = (
    *("", *(command.name for command in APP.registered_commands), *GROUPS),
    *(f"{group} {command}" for group, commands in GROUPS.items() for command in commands),
)
SCRIPT = f"""
import contextlib, io, json, sys
from wingbeat.deployments.cli.main import main
helps = {{}}
for command in {COMMANDS!r}:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    helps[command] = shown.getvalue(), [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps(helps))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[str, list[str]]]:
    """Help of each command, and the heavy modules that were imported to print it."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_every_command_is_looked_at(helps):
    def below(command: str) -> list[str]:
        names = re.findall(r"^  ([\w-]+)  ", helps[command][0].partition("\nCommands:\n")[2], re.M)
        return [f"{command} {name}".strip() for name in names]

    found = [name for top in below("") for name in (top, *(below(top) if top in GROUPS else ()))]
    assert sorted(found) == sorted(COMMANDS[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(helps, command: str):
    text, heavy = helps[command]
    assert text.startswith(f"Usage: wingbeat {command}".rstrip())
    assert not heavy


def test_every_setting_is_shown_once(helps):
    shown = re.findall(r"^  (--[\w-]+)", helps["serve"][0], re.M)
    assert len(shown) == len({*shown})
    assert {*map(option_name, AppConfig.model_fields)} <= {*shown}
    assert "org/name[@revision]" in helps["serve"][0]
