"""A chat template in the place of the model's: the server's own, or a request's where the server lets it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.deployments.api.parsed_bodies import chat
from tests.deployments.http_world import call
from tests.deployments.tool_world import PARSERS, TOKENIZER, USER, ToolPool
from wingbeat.deployments.api.bodies.chat_requests import MAX_TEMPLATE_CHARS
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.surface_options import OF_REQUESTS
from wingbeat.runtime.tokenizer import Tokenizer

SHOUTING = "{% for message in messages %}{{ message.content | upper }}!{% endfor %}"
DEMO = Path(__file__).parents[3] / "examples" / "demo_pair" / "verifier"


@pytest.mark.parametrize("value", ["", 7, {}, "x" * (MAX_TEMPLATE_CHARS + 1)], ids=lambda value: repr(value)[:9])
def test_what_is_no_template_is_refused_whatever_the_setting(value: object):
    with pytest.raises(ApiError) as refused:
        chat(chat_template=value)
    assert (refused.value.param, refused.value.code) == ("chat_template", "unsupported_parameter")


def test_without_the_setting_it_is_refused_by_its_name():
    answer = call(
        ToolPool("fine"),
        "/v1/chat/completions",
        {"messages": [USER], "chat_template": SHOUTING},
        tokenizer=TOKENIZER,
        parsers=PARSERS,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template"
    assert "setting chat_template is 'request'" in answer.json()["error"]["message"]


def test_the_servers_own_template_takes_the_place_of_the_models(tmp_path: Path):
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUTING)
    own = AppConfig(chat_template=str(file)).own_template()
    tokenizer = Tokenizer.load(DEMO, own)
    assert tokenizer.chat_template == SHOUTING
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "HI!"
    assert AppConfig(chat_template=OF_REQUESTS).own_template() is None
    assert Tokenizer.load(DEMO).chat_template == (DEMO / "chat_template.jinja").read_text()


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ValidationError, match="there is no such file; give one, or 'request'"):
        AppConfig(chat_template="/no/such")
