"""A saved prefix of the real application: hit by every request, and again after its engine's process was killed."""

import os
import signal

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SYSTEM = "You continue Python code. " * 12
MESSAGES = [{"role": "system", "content": SYSTEM}]
QUESTION = {"role": "user", "content": "class Queue:"}


def ask(app, messages, **extra):
    """The text, and the prompt's tokens that were cached."""
    answer = app.client.chat.completions.create(
        model="wingbeat-demo", messages=messages, max_tokens=16, temperature=0, extra_body=extra
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def test_a_prefix_outlives_the_engine_and_is_read_from_disk(start_app, tmp_path, until):
    with start_app("prefixes", prefix_dir=str(tmp_path), adaptive=False) as app:
        text, cached = ask(app, [*MESSAGES, QUESTION])
        assert cached == 0
        saved = app.http.post("/v1/prefixes", json={"name": "system", "messages": MESSAGES}).json()
        assert (saved["engines"], saved["saved"]) == (1, str(tmp_path / "system.safetensors"))
        assert ask(app, [QUESTION], prefix="system")[0] == text
        before, file = app.engine(), tmp_path / "system.safetensors"
        written = file.stat().st_mtime_ns
        assert before["num_pinned_blocks"] == saved["blocks"] > 4
        os.kill(before["engine_pid"], signal.SIGKILL)
        until(lambda: app.http.get("/v1/prefixes").json().get("data", [{}])[0].get("engines") == 1)
        after = app.engine()
        assert after["engine_pid"] != before["engine_pid"]
        assert file.stat().st_mtime_ns == written, "it was computed again, and not read"
        assert ask(app, [QUESTION], prefix="system") == (text, 16 * saved["blocks"])
        assert app.http.delete("/v1/prefixes/system").json()["deleted"]
        assert list(tmp_path.iterdir()) == []
        assert app.engine()["num_pinned_blocks"] == 0
        app.check_integrity()
