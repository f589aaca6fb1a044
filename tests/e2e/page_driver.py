"""Operations of the page's tests: open, fill in, send, and read."""

import pytest

from tests.e2e.chromium import find_chromium

MARKS = (
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH, and WINGBEAT_BROWSER names none"),
)
PROMPT = "def read_lines(path):\n    "


def open_page(page, url, model="wingbeat-demo", mode="completion", **screen):
    """As at the first visit; what the console was told by another page is forgotten.

    Args:
        mode: to be chosen, "completion" or "chat"; None leaves the page's own.
    """
    page.send("Page.navigate", url="about:blank")
    page.errors.clear()
    page.send("Storage.clearDataForOrigin", origin=url, storageTypes="local_storage")
    page.open(url, **screen)
    page.until("document.querySelector('#model').textContent.includes('" + model + "')")
    if mode is not None:
        page.click(f".modes label:has([value={mode}])")


def fill(page, prompt=PROMPT, **knobs):
    page.value("document.querySelector('#settings').open = true")
    page.write("#prompt", prompt)
    for name, value in knobs.items():
        page.write(f"#{name}", str(value))


def send(page):
    page.click("#prompt")
    page.press("Enter")


def until_done(page):
    page.until("!document.querySelector('#send').hidden && document.querySelector('.turn:has(.tools)')")
    assert page.value("document.querySelector('.failure')?.textContent") is None
    drawn(page)


def until_failed(page):
    """The page's words for it."""
    page.until("!document.querySelector('#send').hidden && document.querySelector('.failure')")
    drawn(page)
    drawn(page)
    return text(page, ".failure")


def text(page, selector):
    return page.value(f"document.querySelector('{selector}').textContent")


def drawn(page):
    """Wait for the frame after the next: by then everything is drawn."""
    page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def spans(page, pane=1):
    """[text, depth, round] of each token."""
    return page.value(
        f"[...document.querySelectorAll('.pane:nth-child({pane}) .text span[data-round]')]"
        ".map(span => [span.textContent, Number(span.dataset.depth ?? 0), Number(span.dataset.round)])"
    )


def choose_round(page, index):
    page.value(
        f"(slider => {{ slider.value = {index + 1}; slider.dispatchEvent(new Event('input')); }})"
        "(document.querySelector('#round'))"
    )


def fits_sideways(page):
    widest = page.value(
        "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().right))"
    )
    return page.value("document.documentElement.scrollWidth <= innerWidth") and widest <= page.value("innerWidth") + 1
