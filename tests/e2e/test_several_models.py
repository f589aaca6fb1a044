"""Two models behind one endpoint, one with shared drafters, in the real application."""

import re
from collections.abc import Iterator

import pytest

from tests.conftest import App
from tests.optional import FEATURES, is_deleted
from wingbeat.runtime.demo import DEMO_FOLDER
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = DEMO_FOLDER / "draft_model"
SHARED = {} if is_deleted(FEATURES["shared_drafters"]) else {"drafters": {"num": 1}}
MODELS = (
    {"served_model_name": "pair,first", **SHARED, "adaptive": False},
    {"served_model_name": "org/small", "model": str(SMALL), "drafter": FALLBACK.kind},
)
LIMITS = {"max_model_len": 256, "num_kv_blocks": 64}
PROMPT = "def main():\n    "


@pytest.fixture(scope="module")
def app(start_app) -> Iterator[App]:
    with start_app("several", models=MODELS, **LIMITS) as app:
        yield app


def test_each_is_asked_by_its_name_and_drafted_for_by_its_own_drafter(app: App):
    texts = {name: app.text(PROMPT, model=name) for name in ("pair", "first", "org/small")}
    assert texts["pair"] == texts["first"] != texts["org/small"]
    for name in ("pair", "org/small"):
        assert texts[name] == app.text(PROMPT, model=name, extra={"speculation": {"enabled": False}})
    drafted = app.complete(PROMPT, model="pair", extra={"speculation": {"force": True}})
    assert drafted.metrics["speculative_decoding"]["num_accepted_tokens"] > 0
    listed = [card.id for card in app.client.models.list().data]
    assert listed == ["pair", "first", "org/small"]
    assert app.http.post("/v1/completions", json={"prompt": "x"}).status_code == 400


def test_figures_and_health_tell_them_apart(app: App):
    text = app.http.get("/metrics").text
    for name in ("pair", "org/small"):
        assert re.search(rf'^wingbeat_engine_up{{.*model_name="{name}"}} 1.0$', text, re.MULTILINE)
        assert re.search(rf'^vllm:generation_tokens_total{{.*model_name="{name}"}} [1-9]', text, re.MULTILINE)
    assert text.count("# TYPE wingbeat_engine_up gauge") == 1
    assert app.http.get("/health").json()["models"] == {"pair": "ok", "org/small": "ok"}
    assert {engine["model"] for engine in app.http.get("/load").json()["engines"]} == {"pair", "org/small"}
