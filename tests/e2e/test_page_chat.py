"""The page opens on a chat where the model has a chat template, shows Markdown, and names the drafter."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.deployments.http_world import app_for
from tests.e2e.page_driver import MARKS, fill, fits_sideways, open_page, send, text, until_done
from tests.e2e.page_server import listening
from tests.e2e.test_page_form import Tracer
from wingbeat.runtime.scheduling.request import VerifiedRound

pytestmark = list(MARKS)
ANSWER = """# Birds

They **fly** by *lift*, see [a page](https://example.com/x) and `wing()`:

1. Push air down
2. Stay up
   - even *slowly*

```python
def f(x):
    return "<b>x</b>"
```

| a | b |
|---|---|
| 1 | `2` |

> quoted

<img src=x onerror="window.harmed = true"><script>window.harmed = true</script>"""


class Undrafted(Tracer):
    """`Tracer`, and where a `reason` is set, rounds without drafts."""

    reason: str | None = None

    async def generate(self, request, session_id=""):
        async for output in super().generate(request, session_id):
            if self.reason is None:
                yield output
                continue
            plain = (VerifiedRound((token_id,), plain_reason=self.reason) for token_id in output.token_ids)
            yield output._replace(rounds=tuple(plain))


@pytest.fixture(scope="module")
def served():
    pool = Undrafted()
    pool.info = replace(pool.info, drafter="suffix", max_model_len=4096)

    @asynccontextmanager
    async def application():
        yield app_for(pool)

    with listening(application) as url:
        yield pool, url


@pytest.fixture
def page(chromium, served):
    pool, url = served
    pool.says = ANSWER
    pool.requests.clear()
    open_page(chromium, url, model="demo", mode=None)
    yield chromium
    assert chromium.errors == []


def test_it_opens_on_a_chat_with_questions_and_no_limit(page, served):
    assert page.value("document.querySelector('[name=mode]:checked').value") == "chat"
    assert page.value("document.querySelector('#prompt').value") == ""
    page.click("#samples button")
    assert page.value("document.querySelector('#prompt').value").endswith(".")
    send(page)
    until_done(page)
    (request,) = served[0].requests
    assert len(request.prompt_token_ids) + request.params.max_tokens == 4096, "up to the model's length"


def test_an_answer_is_shown_as_markdown_and_never_as_html(page):
    fill(page, "hi")
    send(page)
    until_done(page)
    shape = page.value("[...document.querySelectorAll('.prose > *')].map(e => e.tagName.toLowerCase())")
    assert shape == ["h3", "p", "ol", "pre", "div", "blockquote", "p"]
    assert text(page, ".prose h3") == "Birds"
    assert text(page, ".prose strong") == "fly"
    assert text(page, ".prose .link") == "a page (https://example.com/x)"
    assert page.value("[...document.querySelectorAll('.prose ol > li')].length") == 2
    assert text(page, ".prose ol li ul em") == "slowly"
    assert text(page, ".prose pre code") == 'def f(x):\n    return "<b>x</b>"'
    assert text(page, ".prose td code") == "2"
    assert text(page, ".prose > p:last-child").startswith('<img src=x onerror="window.harmed')
    assert page.value("document.querySelectorAll('.prose :is(img, script, a, b)').length") == 0
    assert page.value("window.harmed === undefined")
    assert "sans-serif" in page.value("getComputedStyle(document.querySelector('.prose')).fontFamily")
    assert page.value("document.querySelector('.text').textContent") == ANSWER, "its tokens are below"
    assert fits_sideways(page)


def test_the_drafter_is_named_where_it_drafted(page):
    fill(page, "hi")
    send(page)
    until_done(page)
    assert "suffix" in text(page, "#notes")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("not_usable", "No round had a draft of suffix: the text so far has no passage that it could continue."),
        ("plain", "No round had a draft of suffix: it was skipped, because its recent drafts saved less"),
        ("no_room", "No round had a draft of suffix: the KV cache had no room for a draft tree."),
    ],
)
def test_it_says_why_nothing_was_drafted_and_by_which_drafter(page, served, reason: str, words: str):
    served[0].says, served[0].reason = "hello", reason
    try:
        fill(page, "hi")
        send(page)
        until_done(page)
    finally:
        served[0].reason = None
    assert text(page, "#notes").startswith(words)
