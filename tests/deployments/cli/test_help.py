"""Help of every command: groups with the most used options first, and nothing heavy is imported for it."""

import json
import re
import subprocess
import sys

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import panels
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


def test_the_most_used_options_of_serve_stand_first_and_the_others_in_groups(helps):
    _, *parts = re.split(r"^([A-Z][^:\n]*):$", helps["serve"][0], flags=re.M)
    groups, texts = parts[::2], parts[1::2]
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)", texts[1], re.M)
    assert options == [*map(option_name, panels.MOST_USED), "--log-level", "--help"]
    panel = panels.panel_of(AppConfig)
    used = {panel(name) for name in AppConfig.model_fields}
    assert groups == ["Arguments", "Options", *(title for title in panels.TITLES if title in used)]


def test_every_setting_is_shown_once(helps):
    shown = re.findall(r"^  (--[\w-]+)", helps["serve"][0], re.M)
    assert len(shown) == len({*shown})
    assert {*map(option_name, AppConfig.model_fields)} <= {*shown}
    assert "org/name[@revision]" in helps["serve"][0]


def test_every_class_of_settings_of_a_server_has_its_panel():
    panel = panels.panel_of(AppConfig)
    assert [name for name in AppConfig.model_fields if panel(name) is None] == [
        name for name in AppConfig.model_fields if name in panels.MOST_USED
    ]
    assert not (panels.OF_FIELD.keys() | {*panels.MOST_USED}) - AppConfig.model_fields.keys() - {"host", "port"}
