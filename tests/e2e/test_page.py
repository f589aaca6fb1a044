"""The page in a real browser, served by the demo pair: it streams, draws, compares and stops."""

import os
import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.e2e.contrast import unreadable
from tests.e2e.page_driver import (
    MARKS,
    PROMPT,
    choose_round,
    drawn,
    fill,
    fits_sideways,
    open_page,
    send,
    spans,
    until_done,
)
from tests.e2e.page_server import serving
from wingbeat.deployments.api.access import Access

pytestmark = list(MARKS)
KEY = "page-key"
MAX_PICTURE_BYTES = 300_000


@pytest.fixture(scope="module")
def url():
    with serving(Access(api_keys=(SecretStr(KEY),))) as url:
        yield url


@pytest.fixture(scope="module")
def keyed(chromium):
    # As if the key had been typed in this tab before.
    source = f"if (location.protocol === 'http:') sessionStorage.setItem('wingbeat.key', '{KEY}')"
    script = chromium.send("Page.addScriptToEvaluateOnNewDocument", source=source)
    yield chromium
    chromium.send("Page.removeScriptToEvaluateOnNewDocument", **script)


@pytest.fixture
def page(keyed, url):
    """The page with an API key, on a wide screen; whatever it did, its console has no error."""
    open_page(keyed, url)
    yield keyed
    assert keyed.errors == []


def test_an_answer_streams_in_and_its_tokens_are_shaded_by_depth(page):
    fill(page, temperature=0, max_tokens=96)
    send(page)
    page.until("document.querySelectorAll('.text span[data-round]').length > 3")
    assert page.value("!document.querySelector('#stop').hidden"), "tokens are there before the answer is complete"
    until_done(page)
    tokens = spans(page)
    assert len(tokens) == 96
    assert page.value("document.querySelector('.text').textContent") == PROMPT + "".join(text for text, _, _ in tokens)
    by_round = {}
    for _, depth, number in tokens:
        by_round.setdefault(number, []).append(depth)
    assert max(map(len, by_round.values())) > 2
    # The last round may have been cut.
    for depths in list(by_round.values())[:-1]:
        assert depths == [*range(1, len(depths)), 0]
    colours = page.value(
        "[...document.querySelectorAll('.text span[data-round]')].map(span => [span.dataset.depth ?? '0',"
        " getComputedStyle(span).backgroundColor])"
    )
    shades = dict(colours)
    assert len({colour for _, colour in colours}) == len(shades) > 3
    assert shades["0"] == "rgba(0, 0, 0, 0)"
    assert float(page.value("document.querySelector('#length').textContent")) > 1.5


def test_the_tree_is_drawn_with_its_accepted_path(page):
    fill(page, temperature=0, max_tokens=64)
    send(page)
    until_done(page)
    tokens = spans(page)
    numbers = sorted({number for _, _, number in tokens})
    num_trees = 0
    for number in numbers:
        choose_round(page, number)
        own = [(text, depth) for text, depth, of in tokens if of == number]
        caption = page.value("document.querySelector('#caption').textContent")
        assert caption.startswith(f"Round {number + 1} of {len(numbers)}")
        assert page.value("document.querySelectorAll('.text span.shown').length") == len(own)
        if "no draft" in caption:
            continue
        num_trees += 1
        kept, drafted = map(int, re.search(r"(\d+) of (\d+) drafted kept", caption).groups())
        assert page.value("document.querySelectorAll('#tree g').length") == 1 + drafted + any(d == 0 for _, d in own)
        assert page.value("document.querySelectorAll('#tree g.taken:not(.bonus)').length") == kept
        path = page.value("[...document.querySelectorAll('#tree g.taken title')].map(title => title.textContent)")
        spelled = [text for text, depth in own if depth]
        assert [title.rpartition(",")[0] for title in path][: len(spelled)] == [js_string(text) for text in spelled]
    assert num_trees > 5


def js_string(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'


def test_a_click_on_a_token_chooses_its_round(page):
    fill(page, temperature=0, max_tokens=40)
    send(page)
    until_done(page)
    number = spans(page)[20][2]
    page.value("document.querySelectorAll('.text span[data-round]')[20].id = 'this-one'")
    page.click("#this-one")
    assert page.value("document.querySelector('#caption').textContent").startswith(f"Round {number + 1} of")
    assert page.value("document.querySelector('#this-one').classList.contains('shown')")


@pytest.mark.parametrize(("temperature", "mode"), [(0, "completion"), (0.8, "completion"), (0.8, "chat")])
def test_the_comparison_shows_two_equal_texts_and_both_speeds(page, temperature, mode):
    fill(page, temperature=temperature, max_tokens=48)
    page.click(f".modes label:has([value={mode}])")
    page.click("#compare")
    page.click("#send")
    until_done(page)
    fast, slow = spans(page, 1), spans(page, 2)
    assert [text for text, _, _ in fast] == [text for text, _, _ in slow]
    assert {depth for _, depth, _ in slow} == {0}
    assert max(depth for _, depth, _ in fast) > 0
    assert page.value("document.querySelector('.verdict').textContent").startswith("Equal texts. All")
    for figure in ("#speed", "#ratio"):
        assert float(page.value(f"document.querySelector('{figure}').textContent")) > 0
    for bar in ("#fast", "#slow"):
        assert re.fullmatch(r"[\d,]+/s", page.value(f"document.querySelector('{bar}').textContent"))


def test_escape_stops_the_stream_and_the_engine(page):
    fill(page, max_tokens=900)
    send(page)
    page.until("document.querySelectorAll('.text span[data-round]').length > 10")
    page.press("Escape")
    page.until("document.querySelector('#status').textContent === 'Stopped.'")
    count = len(spans(page))
    assert 10 < count < 900
    page.until("document.querySelector('#load').textContent.startsWith('Engine: 0 of')")
    assert len(spans(page)) == count
    assert page.value("document.activeElement.id") == "prompt"


def test_a_conversation_keeps_its_turns(page):
    page.click(".modes label:has([value=chat])")
    for word in ("<b>def</b>", "second"):
        fill(page, word, max_tokens=16)
        send(page)
        until_done(page)
    assert page.value("[...document.querySelectorAll('.asked')].map(p => p.textContent)") == ["<b>def</b>", "second"]
    assert page.value("document.querySelectorAll('.turn').length") == 2
    assert page.value("document.querySelectorAll('.turn b').length") == 0, "no HTML comes out of texts"
    page.click("#clear")
    assert page.value("document.querySelectorAll('.turn').length") == 0


def test_a_key_that_is_typed_stays_in_the_tab(page):
    fill(page, key="another")
    page.click("#prompt")
    assert page.value("sessionStorage.getItem('wingbeat.key')") == "another"
    assert page.value("Object.values(localStorage).join('') + document.cookie").count("another") == 0
    fill(page, max_tokens=4)
    page.value("document.querySelector('#settings').open = false")
    page.click("#send")
    page.until("document.querySelector('.failure')")
    assert "API key" in page.value("document.querySelector('.failure').textContent")
    assert page.value("document.querySelector('#settings').open")
    assert all("401" in error for error in page.errors)
    page.errors.clear()


def test_an_error_of_the_server_is_shown_in_its_words(page):
    fill(page, max_tokens=5000)
    page.click("#send")
    page.until("document.querySelector('.failure')")
    assert "maximum context length is 1024" in page.value("document.querySelector('.failure').textContent")
    assert any("400" in error for error in page.errors)
    page.errors.clear()


def test_every_control_is_reached_by_tab_and_shows_it(page):
    page.value("document.querySelector('#settings').open = true; document.activeElement.blur()")
    seen = []
    for _ in range(30):
        page.press("Tab")
        seen.append(
            page.value("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
        outline = (
            "getComputedStyle(document.activeElement.closest('.modes label') ?? document.activeElement).outlineStyle"
        )
        assert seen[-1] == "BODY" or page.value(outline) != "none", f"no focus is seen on {seen[-1]}"
    assert {"prompt", "mode", "compare", "force", "send", "temperature", "top_p", "max_tokens", "seed", "key"} <= set(
        seen
    )


def test_keys_go_through_a_phone_s_page_in_the_order_of_the_eye(page, url):
    open_page(page, url, width=390, height=844)
    fill(page, max_tokens=8)
    page.click("#send")
    until_done(page)
    page.value("document.activeElement.blur()")
    seen = []
    for _ in range(30):
        page.press("Tab")
        seen.append(page.value("document.activeElement.closest('form, #transcript, aside')?.tagName ?? ''"))
    first = {place: seen.index(place) for place in ("FORM", "DIV", "ASIDE")}
    assert list(first) == sorted(first, key=first.get)


def test_an_answer_is_read_out_once_it_is_there(page):
    busy = "document.querySelector('#transcript').getAttribute('aria-busy')"
    fill(page, max_tokens=200)
    send(page)
    page.until("document.querySelectorAll('.text span[data-round]').length > 3")
    assert page.value(busy) == "true"
    until_done(page)
    assert page.value(busy) == "false"
    assert page.value("document.querySelector('#transcript').getAttribute('role')") == "log"
    assert page.value("document.querySelector('#status').textContent").startswith("Done: 200 tokens")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_a_picture_of_a_real_answer_fits_its_screen(page, url, tmp_path, width, dark):
    """The environment variable WINGBEAT_PICTURES names a folder for the pictures."""
    folder = Path(os.environ.get("WINGBEAT_PICTURES", tmp_path))
    picture = folder / f"page_{width}{'_dark' if dark else ''}.png"
    open_page(page, url, width=width, height=800 if width > 390 else 844, dark=dark)
    assert fits_sideways(page)
    fill(page, seed=2, max_tokens=60)
    page.value(f"document.querySelector('#settings').open = {str(width > 390).lower()}")
    page.click("#compare")
    page.click("#send")
    until_done(page)
    assert fits_sideways(page)
    page.until("document.querySelector('#load').textContent.startsWith('Engine: 0 of')")
    largest = max(range(1, 12), key=lambda number: (tree_size(page, number), number))
    choose_round(page, largest)
    page.value("document.activeElement.blur(), document.querySelector('#transcript').scrollTo(0, 0)")
    drawn(page)
    page.picture(picture, whole=width == 390)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20]) == width
    assert len(data) < MAX_PICTURE_BYTES
    assert unreadable(page) == []
    body = page.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", body)[:3])) < 200) == dark


def tree_size(page, number):
    """Nodes kept, then nodes drawn."""
    choose_round(page, number)
    return page.value(
        "[document.querySelectorAll('#tree g.taken').length, document.querySelectorAll('#tree g').length]"
    )
