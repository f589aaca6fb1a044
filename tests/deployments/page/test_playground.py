"""Browsers get the page at `/`, which needs no other server; other clients get the former answer."""

import base64
import hashlib
import re

import pytest

from tests.deployments.http_world import FakePool, call
from wingbeat.deployments.page.playground import FOLDER, SCRIPTS, page, page_headers
from wingbeat.runtime.engine.round_counts import NoTree
from wingbeat.runtime.engine.speculation import Reason

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
HTML = page(chats=True)
"""The tests' model has a chat template."""


def root(accept=None):
    return call(FakePool(), "/", method="GET", headers={"Accept": accept} if accept else None)


def policy():
    parts = root(BROWSER).headers["Content-Security-Policy"].split("; ")
    return {name: values.split() for name, _, values in (part.partition(" ") for part in parts)}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "accept",
    [None, "*/*", BROWSER, "TEXT/HTML", "text/plain", "", "no;;q=x,", "application/json;q=0.2, text/*;q=0.8"],
)
def test_whoever_does_not_ask_for_json_gets_the_page(accept):
    answer = root(accept)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.text == HTML
    assert "Accept" in answer.headers["Vary"]


@pytest.mark.parametrize(
    "accept",
    ["Application/JSON; charset=utf-8", "application/json, text/plain, */*", "application/*", "text/html;q=0, */*"],
)
def test_who_asks_for_json_gets_name_and_model(accept):
    answer = root(accept)
    assert answer.json() == {"name": "wingbeat", "model": "demo", "api": "/v1"}
    assert "Accept" in answer.headers["Vary"]


def test_it_opens_on_a_chat_where_the_model_has_a_template_and_else_on_a_completion():
    assert "<body data-chat>" in root(BROWSER).text
    assert "<body>" in page(chats=False)


def test_the_page_is_whole():
    for part in FOLDER.iterdir():
        if part.suffix in (".css", ".js"):
            assert part.read_text(encoding="utf-8") in HTML, part.name
    assert {part.name for part in FOLDER.glob("*.js")} == set(SCRIPTS)


def test_nothing_runs_but_the_page_s_own_script_and_style():
    directives = policy()
    assert directives["default-src"] == ["'none'"]
    assert directives["connect-src"] == ["'self'"]
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives[f"{element}-src"] == [f"'sha256-{digest}'"]


def test_the_page_names_no_resource_but_its_own_server():
    found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<>]*", HTML)
    # The namespace of SVG is a name, not an address.
    assert {url for url in found if not url.endswith("//www.w3.org/2000/svg")} == set()
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"(?!data:)", HTML)
    assert "@import" not in HTML
    assert "url(" not in HTML


def test_no_text_becomes_html():
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", HTML)
    assert not re.findall(r"<[^>]*\son\w+=", HTML), "handlers in attributes are refused by the policy"
    assert not re.findall(r"<[^>]*\sstyle=", HTML.partition("<body>")[2])
    assert policy()["require-trusted-types-for"] == ["'script'"]


def test_a_page_with_a_second_script_is_refused():
    with pytest.raises(ValueError, match="2 <script>"):
        page_headers(HTML.replace("</body>", "<script>1</script></body>"))


def test_every_reason_of_a_plain_round_is_said_in_words():
    drafted = {Reason.SPECULATE, Reason.PROBE_DRAFT, Reason.FORCED}
    (words,) = re.findall(r"const REASONS = \{(.*?)\};", HTML, re.DOTALL)
    said = set(re.findall(r"^  (\w+): \"", words, re.MULTILINE))
    assert said == {*NoTree, *Reason} - {NoTree.PROMPT, *drafted}
    assert f'"{NoTree.PROMPT}"' in HTML


def test_every_input_has_a_label():
    field = r"<(?:input|textarea|select)[^>]*\bid=\"([\w-]+)\""
    ids = set(re.findall(field, HTML))
    by_for = set(re.findall(r"<label[^>]*\bfor=\"([\w-]+)\"", HTML))
    inside = set(re.findall(rf"<label[^>]*>(?:(?!</label>).)*?{field}", HTML, re.DOTALL))
    assert ids == by_for | inside
