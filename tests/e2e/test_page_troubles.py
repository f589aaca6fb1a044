"""The page when something is wrong: it says what happened, in sight, and shows nothing of an earlier answer."""

from contextlib import asynccontextmanager
from unittest import mock

import pytest

from tests.deployments.http_world import FakePool, app_for
from tests.e2e.contrast import unreadable
from tests.e2e.cut_wire import wire_to
from tests.e2e.page_driver import MARKS, choose_round, fill, open_page, send, spans, text, until_done, until_failed
from tests.e2e.page_server import listening, serving
from tests.runtime.adaptive.losing_policy import POLICY, LosingPolicy

pytestmark = list(MARKS)
NOTHING = ["\N{EN DASH}"] * 3 + [""]
SCREENS = pytest.mark.parametrize("width", [1280, 390])


@pytest.fixture(scope="module")
def wire():
    with serving() as url, wire_to(url) as wire:
        yield wire


@pytest.fixture
def page(chromium, wire):
    open_page(chromium, wire.url)
    return chromium


def in_sight(page, selector):
    return page.value(
        f"(({{top, bottom}}) => top >= 0 && bottom <= innerHeight)"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )


def panel(page):
    return [text(page, f"#{name}") for name in ("length", "speed", "ratio", "caption")]


@SCREENS
def test_a_server_that_dies_in_the_middle_and_one_that_is_gone_are_said_in_words(page, wire, width):
    open_page(page, wire.url, width=width, height=800)
    fill(page, max_tokens=900)
    page.click("#send")
    page.until("document.querySelectorAll('.text span[data-round]').length > 20")
    wire.cut()
    try:
        assert "ended in the middle of the answer" in until_failed(page)
        assert len(spans(page)) > 20, "what came stays"
        assert in_sight(page, ".failure")
        page.click("#send")
        page.until("document.querySelector('.failure')?.textContent.includes('cannot be reached')")
        until_failed(page)
        assert in_sight(page, ".failure")
        assert panel(page) == NOTHING
        assert page.value("document.querySelectorAll('#tree g, .pane').length") == 0
        assert text(page, "#tree") == "No round came."
        page.until("document.querySelector('#load').textContent === 'The server cannot be reached'")
    finally:
        wire.mend()
    fill(page, max_tokens=8)
    page.click("#send")
    page.until("!document.querySelector('.failure')")
    until_done(page)
    assert len(spans(page)) == 8


@pytest.mark.parametrize("dark", [False, True])
def test_a_refusal_can_be_read(page, wire, dark):
    open_page(page, wire.url, dark=dark)
    page.click(".modes label:has([value=chat])")
    fill(page, max_tokens=5000)
    page.click("#send")
    until_failed(page)
    assert unreadable(page) == []


@SCREENS
def test_a_refusal_is_in_sight_and_leaves_no_tree_of_the_answer_before(page, wire, width):
    open_page(page, wire.url, width=width, height=700)
    fill(page, max_tokens=40)
    page.click("#send")
    until_done(page)
    assert page.value("document.querySelectorAll('#tree g').length") > 0
    fill(page, max_tokens=5000)
    page.click("#send")
    assert "maximum context length" in until_failed(page)
    assert in_sight(page, ".failure")
    assert panel(page) == NOTHING
    assert page.value("document.querySelectorAll('#tree g').length") == 0
    assert page.value("document.querySelector('.failure').getAttribute('role')") == "alert"


def test_a_cleared_page_shows_nothing_of_what_was(page):
    before = text(page, "#tree"), *panel(page)
    fill(page, max_tokens=20)
    send(page)
    until_done(page)
    page.click("#clear")
    assert (text(page, "#tree"), *panel(page)) == before
    assert page.value("document.querySelector('#round').disabled")


def test_a_prompt_that_failed_can_be_sent_again(page, wire):
    page.click(".modes label:has([value=chat])")
    fill(page, "hello", max_tokens=8)
    wire.cut()
    try:
        send(page)
        until_failed(page)
    finally:
        wire.mend()
    assert page.value("document.querySelector('#prompt').value") == "hello"
    send(page)
    until_done(page)
    assert page.value("document.querySelectorAll('.turn').length") == 1


def test_what_is_no_answer_of_the_server_is_not_shown_as_one(page):
    for answer, words in (
        ("new Response('<html>502</html>', {status: 502})", "answered with status 502"),
        ("new Response('data: <html>\\n\\n')", "not from a Wingbeat server"),
        ("new Response('data: {\"choices\": []}\\n\\n')", "ended in the middle of the answer"),
    ):
        page.value(
            "(real => { window.fetch = (url, ...more) => url.includes('/v1/completions') ?"
            f" Promise.resolve({answer}) : real(url, ...more); }})(window.fetch)"
        )
        fill(page, max_tokens=8)
        send(page)
        assert words in until_failed(page)


def test_an_engine_that_fails_in_the_middle_is_said_with_its_words(chromium):
    pool = FakePool("hello world, once more", 2)
    pool.fail_after = (3, RuntimeError("the engine broke"))

    @asynccontextmanager
    async def application():
        yield app_for(pool)

    with listening(application) as url:
        open_page(chromium, url, model="demo")
        fill(chromium, max_tokens=20)
        send(chromium)
        assert until_failed(chromium)
        assert "Failed to fetch" not in text(chromium, ".failure")


@pytest.fixture(scope="module")
def busy():
    """A server on which drafting does not pay."""
    with mock.patch(POLICY, LosingPolicy), serving(adaptive=True) as url:
        yield url


def test_a_server_that_decodes_plainly_says_why_and_compares_nothing(chromium, busy):
    open_page(chromium, busy)
    fill(chromium, temperature=0, max_tokens=12)
    chromium.click("#compare")
    send(chromium)
    until_done(chromium)
    why = text(chromium, "#notes")
    assert "drafting does not pay at this load" in why
    assert "“Always draft”" in why
    assert text(chromium, "#ratio-label") == "rounds"
    assert chromium.value("document.querySelector('#speeds').hidden")
    # Some rounds draft all the same, to find out whether it pays now.
    last_plain = max(number for number in range(1, 12) if not is_drafted(chromium, number))
    choose_round(chromium, last_plain)
    assert "drafting does not pay at this load" in text(chromium, "#tree")
    assert "drafting does not pay at this load" in text(chromium, "#status")


def is_drafted(page, number):
    choose_round(page, number)
    return "no draft" not in text(page, "#caption")


def test_drafts_can_be_forced_there_and_then_are_compared(chromium, busy):
    open_page(chromium, busy)
    fill(chromium, temperature=0, max_tokens=48)
    chromium.click("#compare")
    chromium.click("#force")
    send(chromium)
    until_done(chromium)
    assert max(depth for _, depth, _ in spans(chromium)) > 1
    assert text(chromium, ".verdict").startswith("Equal texts.")
    assert text(chromium, "#ratio-label") == "times plain speed"
    assert "does not pay" not in text(chromium, "#notes")
    assert chromium.value("document.querySelectorAll('#tree g').length") > 1
    assert chromium.errors == []
