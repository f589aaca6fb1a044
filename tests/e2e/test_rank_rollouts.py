"""A verifier over two ranks behind the router sleeps, wakes up and changes its weights as one process does."""

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import MODEL
from tests.e2e.greedy_texts import generated, texts
from tests.e2e.test_rollouts import GLOO, post, update
from tests.runtime.pushed_folder import pushed_folder
from tests.small_verifiers import save_two_kv_heads
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_ranks_sleep_and_change_together(start_app, tmp_path: Path, until):
    from ray import serve

    old = tmp_path / "step-0"
    old.mkdir()
    save_two_kv_heads(old)
    new = pushed_folder(tmp_path / "step-1", old)
    (*by_old, _), (*by_new, _) = generated(old), generated(new)
    settings = {"model": old, "served_model_name": MODEL, "drafter": FALLBACK.kind, "tensor_parallel_size": 2}
    with start_app("rollouts-ranks", engine_wait_s=60.0, **settings, **GLOO) as app:
        assert texts(app) == by_old != by_new
        post(app, "sleep", level=1)
        assert app.http.get("/is_sleeping").json() == {"is_sleeping": True}
        post(app, "resume", 409)
        post(app, "wake_up", 400, tags=["graphs"])
        post(app, "wake_up")
        assert texts(app) == by_old

        handle = serve.get_app_handle(app.name)
        assert handle.sleep.remote(level=2, mode="keep").result() == {"status": "sleeping"}
        with pytest.raises(Exception, match="the engine sleeps without its weights"):
            handle.start_weight_update.remote().result()
        with pytest.raises(Exception, match="level"):
            handle.sleep.remote(level=3).result()
        with pytest.raises(Exception, match="'graphs'"):
            handle.wake_up.remote(tags=["graphs"]).result()
        assert handle.wake_up.remote(tags=["weights"]).result() == {"status": "awake"}
        update(app, new)
        handle.wake_up.remote(tags=["kv_cache"]).result()
        assert texts(app) == by_new
        assert post(app, "weight_checker", action="checksum")["checksums"]

        # An engine whose rank dies begins anew, with the weights of the settings: it serves nothing.
        post(app, "sleep", level=1)
        before = app.engine()["engine_pid"]
        os.kill(app.engine()["rank_pids"][0], signal.SIGKILL)
        until(lambda: pid_of(app) not in (None, before), 120)
        update(app, old)
        assert texts(app) == by_old
        app.check_integrity()


def pid_of(app) -> int | None:
    try:
        return app.engine()["engine_pid"]
    except Exception:  # it begins anew
        return None
