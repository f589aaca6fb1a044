"""Groups of options in help, with the most used options first."""

import re

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.main import main
from wingbeat.deployments.cli.options import option_name
from wingbeat.deployments.help_panels import panels


def test_the_most_used_options_of_serve_stand_first_and_the_others_in_groups(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    _, *parts = re.split(r"^([A-Z][^:\n]*):$", capsys.readouterr().out, flags=re.M)
    groups, texts = parts[::2], parts[1::2]
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)", texts[1], re.M)
    assert options == [*map(option_name, panels.MOST_USED), "--log-level", "--help"]
    panel = panels.panel_of(AppConfig)
    used = {panel(name) for name in AppConfig.model_fields}
    assert groups == ["Arguments", "Options", *(title for title in panels.TITLES if title in used)]


def test_every_class_of_settings_of_a_server_has_its_panel():
    panel = panels.panel_of(AppConfig)
    assert [name for name in AppConfig.model_fields if panel(name) is None] == [
        name for name in AppConfig.model_fields if name in panels.MOST_USED
    ]
    assert not (panels.OF_FIELD.keys() | {*panels.MOST_USED}) - AppConfig.model_fields.keys() - {"host", "port"}
