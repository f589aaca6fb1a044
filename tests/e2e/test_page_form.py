"""Inputs and outputs of the page: keys, kept texts, models, commands, texts of every script."""

import json
import shlex
import subprocess
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.deployments.api.answers.test_round_trace import TracedPool
from tests.deployments.http_world import TOKENIZER, app_for
from tests.e2e.page_driver import MARKS, choose_round, drawn, fill, open_page, send, spans, text, until_done
from tests.e2e.page_server import listening
from wingbeat.runtime.scheduling.request import Variant

pytestmark = list(MARKS)
FAMILY, FLAG = "👩‍👩‍👧", "🇯🇵"
SCRIPTS = {
    "hanzi": "漢字かな交じり文。",
    "emoji": f"a {FAMILY} b {FLAG} c 👍🏽",
    "accents": "cafe\u0301 no\u0308",
    "arabic": "مرحبا بالعالم، كيف الحال؟",
    "hebrew": "שלום abc עולם",
    "thai": "สวัสดีชาวโลก",
}


class Tracer(TracedPool):
    """Answers with what its test says, and has a variant."""

    def __init__(self):
        super().__init__(lambda request: self.says, 5)
        self.info = replace(self.info, max_model_len=1024)
        self.says = "hello world"

    def loads(self):
        return []


@pytest.fixture(scope="module")
def served():
    pool = Tracer()

    @asynccontextmanager
    async def application():
        pool.variants.put("clerk", Variant("clerk", "good", "digest"))
        yield app_for(pool)

    with listening(application) as url:
        yield pool, url


@pytest.fixture
def pool(served):
    pool, _ = served
    pool.says = "hello world"
    pool.requests.clear()
    return pool


@pytest.fixture
def page(chromium, served):
    open_page(chromium, served[1], model="demo")
    yield chromium
    assert chromium.errors == []


def prompts(pool):
    return [TOKENIZER.decode(request.prompt_token_ids) for request in pool.requests]


def copied(page, button):
    """Text that a button copies to the clipboard."""
    page.value(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true,"
        " value: {writeText: async text => { window.copied = text; }}})"
    )
    page.value(f"[...document.querySelectorAll('.tools button')].find(b => b.textContent === '{button}').id = 'this'")
    page.click("#this")
    page.until("window.copied !== undefined")
    page.value("document.querySelector('#this').removeAttribute('id')")
    return page.value("(text => { delete window.copied; return text; })(window.copied)")


def test_enter_sends_and_with_shift_begins_a_line(page, pool):
    fill(page, max_tokens=20)
    page.write("#prompt", "one")
    page.press("Enter", shift=True)
    assert page.value("document.querySelectorAll('.turn').length") == 0
    page.send("Input.insertText", text="two")
    page.press("Enter")
    until_done(page)
    assert page.value("document.querySelector('#prompt').value") == "one\ntwo"
    assert prompts(pool) == ["one\ntwo"]


def test_enter_that_ends_a_word_of_an_input_method_sends_nothing(page, pool):
    fill(page, "か", max_tokens=20)
    page.value(
        "document.querySelector('#prompt').dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', bubbles: true, isComposing: true}))"
    )
    drawn(page)
    assert pool.requests == []


def test_a_conversation_has_its_system_prompt_and_the_chosen_adapter(page, pool):
    page.click(".modes label:has([value=chat])")
    fill(page, "first", max_tokens=20, system="Be short.")
    page.value("document.querySelector('#adapter').value = 'clerk'")
    send(page)
    until_done(page)
    assert page.value("document.querySelector('#prompt').value") == "", "the next message can be written at once"
    fill(page, "next")
    send(page)
    page.until("document.querySelectorAll('.turn .tools').length === 2")
    assert prompts(pool) == ["Be short.first>", "Be short.firsthello worldnext>"]
    assert [request.variant.name for request in pool.requests] == ["clerk", "clerk"]


def test_an_adapter_that_was_loaded_meanwhile_can_be_chosen(page, pool, served):
    names = "[...document.querySelector('#adapter').options].map(option => option.textContent)"
    assert page.value(names) == ["demo", "clerk (adapter)"]
    page.value("document.querySelector('#settings').open = false; document.querySelector('#adapter').value = 'clerk'")
    pool.variants.put("other", Variant("other", "other", "digest of other"))
    page.click("#settings summary")
    page.until(f"{names}.length === 3")
    assert page.value("document.querySelector('#adapter').value") == "clerk"


def test_what_was_typed_is_there_after_a_reload_but_for_the_key(page, served):
    page.click(".modes label:has([value=chat])")
    fill(page, "kept 漢字\nsecond", max_tokens=33, key="secret", system="Be brief.")
    page.click("#force")
    page.open(served[1])
    values = page.value("['prompt', 'max_tokens', 'system'].map(id => document.getElementById(id).value)")
    assert values == ["kept 漢字\nsecond", "33", "Be brief."]
    assert page.value("document.querySelector('#force').checked && document.querySelector('[value=chat]').checked")
    assert "secret" not in page.value("Object.values(localStorage).join()")
    page.value("sessionStorage.clear()")


@pytest.mark.parametrize("storage", ["'{\"prompt\": 7}'", "'not JSON'", "'null'"])
def test_whatever_was_kept_the_page_works(page, served, pool, storage):
    page.value(f"localStorage.setItem('wingbeat.form', {storage})")
    page.open(served[1])
    fill(page, "hi", max_tokens=20)
    send(page)
    until_done(page)


def test_a_browser_that_stores_nothing_has_a_page_that_works(page, served, pool):
    refusing = page.send(
        "Page.addScriptToEvaluateOnNewDocument",
        source="for (const name of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, name, {get() { throw new DOMException('no', 'SecurityError'); }})",
    )
    try:
        page.open(served[1])
        fill(page, "hi", max_tokens=20)
        send(page)
        until_done(page)
    finally:
        page.send("Page.removeScriptToEvaluateOnNewDocument", **refusing)


def test_the_text_and_a_command_that_brings_it_can_be_copied(page, pool):
    pool.says = 'it\'s "5" $HOME `x`\n漢字'
    fill(page, 'say it\'s "so" $HOME `x` \\ 漢字', max_tokens=50, temperature=0.5, key="secret")
    send(page)
    until_done(page)
    assert copied(page, "Copy text") == pool.says
    command = copied(page, "Copy as curl")
    assert "secret" not in command
    assert "$WINGBEAT_API_KEY" in command
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["text"] == pool.says
    shown, run = pool.requests
    assert (run.prompt_token_ids, run.params.seed, run.params.temperature) == (
        shown.prompt_token_ids,
        shown.params.seed,
        0.5,
    )
    assert shlex.split(command)[0] == "curl"
    page.value("sessionStorage.clear()")


def test_without_a_clipboard_the_page_copies_what_it_selects(page, pool):
    fill(page, "hi", max_tokens=20)
    send(page)
    until_done(page)
    page.value(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined});"
        "document.addEventListener('copy', () => { window.taken = document.activeElement.value; })"
    )
    page.click(".tools button")
    page.until("window.taken === 'hello world'")


@pytest.mark.parametrize("script", SCRIPTS)
def test_characters_of_several_tokens_are_whole(page, pool, script):
    pool.says = SCRIPTS[script]
    fill(page, pool.says, max_tokens=60)
    send(page)
    until_done(page)
    tokens = spans(page)
    assert "".join(token for token, _, _ in tokens) == pool.says
    assert "\ufffd" not in text(page, ".pane")
    for number in range(max(number for _, _, number in tokens) + 1):
        choose_round(page, number)
        assert "\ufffd" not in page.value("[...document.querySelectorAll('#tree text')].map(t => t.textContent).join()")
        assert page.value(
            "[...document.querySelectorAll('#tree g')].every(g =>"
            " g.querySelector('text').getBBox().width <= g.querySelector('rect').getBBox().width)"
        )
    # Right-to-left texts begin on the right, the others on the left.
    begins = page.value(
        "(text => { const range = document.createRange(), first = text.querySelector('.given').firstChild;"
        " range.setStart(first, 0); range.setEnd(first, 1); const box = text.getBoundingClientRect(),"
        " at = range.getBoundingClientRect(); return (at.x - box.x) / box.width; })(document.querySelector('.text'))"
    )
    assert (begins > 0.5) == (script in ("arabic", "hebrew"))


def test_the_newest_answer_is_right_below_the_form_on_a_phone(page, served, pool):
    open_page(page, served[1], model="demo", width=390, height=844)
    page.click(".modes label:has([value=chat])")
    for word in ("one", "two", "three"):
        fill(page, word, max_tokens=20)
        page.click("#send")
        until_done(page)
    said = "[...document.querySelectorAll('.asked')].map(p => p.textContent)"
    assert page.value(said) == ["three", "two", "one"]
    top = "document.querySelector('{}').getBoundingClientRect()"
    assert page.value(f"{top.format('.turn')}.top >= {top.format('form')}.bottom")
    assert page.value(f"{top.format('.turn')}.top < {top.format('aside')}.top")
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    page.until(f"{said}[0] === 'one'")
    assert page.value(said) == ["one", "two", "three"]
