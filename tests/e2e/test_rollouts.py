"""Weights that change under a running application: by whom, while what dies, and with what left of memory."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import MODEL, App
from tests.e2e.greedy_texts import NUM_TOKENS, PROMPTS, generated, text, texts
from tests.runtime.pushed_folder import FILE, pushed_folder, tensors
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.heads.files import read_tensors

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
GLOO = {"rollouts": True, "weight_transfer_config": {"backend": "gloo"}, "adaptive": False}


def post(app: App, path: str, status: int = 200, **fields) -> dict:
    answer = app.http.post(f"/{path}", json=fields, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def update(app: App, folder: Path) -> None:
    post(app, "start_weight_update")
    post(app, "update_weights", update_info={"files": [str(folder / FILE)]})
    post(app, "finish_weight_update")


def test_two_replicas_change_together_and_one_that_comes_back_waits_for_the_next_update(
    start_app, tmp_path: Path, until
):
    first, second = pushed_folder(tmp_path / "step-1"), pushed_folder(tmp_path / "step-2", seed=2)
    (*by_first, _), (*by_second, _) = generated(first), generated(second)
    with start_app("rollouts", num_replicas=2, engine_wait_s=60.0, **GLOO) as app:
        assert app.http.get("/get_world_size").json() == {"world_size": 2}
        fingerprint = app.complete(PROMPTS[0], max_tokens=1).system_fingerprint
        update(app, first)
        assert [texts(app) for _ in range(4)] == [by_first] * 4
        assert app.complete(PROMPTS[0], max_tokens=1).system_fingerprint != fingerprint

        # An engine that begins anew has the weights of the settings: it serves nothing.
        engines = app.engines()
        victim = next(iter(engines.values()))["engine_pid"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: _pids(app) and victim not in _pids(app), 60)
        assert [texts(app) for _ in range(4)] == [by_first] * 4
        update(app, second)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: texts(app), range(8)))
        assert answers == [by_second] * 8
        app.check_integrity()


def _pids(app: App) -> set[int]:
    try:
        engines = app.engines().values()
    except Exception:  # one of them begins anew
        return set()
    return {engine["engine_pid"] for engine in engines} if len(engines) == 2 else set()


def test_nothing_is_lost_while_a_drafter_and_an_engine_die_and_weights_change(start_app, tmp_path: Path, until):
    folder = pushed_folder(tmp_path / "step-1")
    (*by_new, _), (*by_old, _) = generated(folder), generated(demo_pair().verifier)
    with (
        start_app("rollouts-loss", num_replicas=2, engine_wait_s=60.0, **GLOO) as app,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = [threads.submit(text, app, PROMPTS[index % len(PROMPTS)]) for index in range(240)]
        first, second = app.engines().values()
        until(lambda: sum(one.done() for one in answers) > 30, 60)
        os.kill(first["drafter_pid"], signal.SIGKILL)
        until(lambda: sum(one.done() for one in answers) > 60, 60)
        update(app, folder)
        until(lambda: sum(one.done() for one in answers) > 120, 60)
        os.kill(second["engine_pid"], signal.SIGKILL)
        found = [one.result() for one in answers]
        # Requests that run while weights change begin with the old weights and end with the new ones.
        both = [index for index, got in enumerate(found) if got not in (by_old[index % 3], by_new[index % 3])]
        assert len(both) <= 8
        assert [found[index] for index in range(180, 240)] == [by_new[index % 3] for index in range(180, 240)]


def test_what_is_kept_ends_by_the_new_weights_and_what_is_aborted_says_so(start_app, tmp_path: Path):
    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)
    with start_app("rollouts-kept", **GLOO) as app, ThreadPoolExecutor(4) as threads:
        post(app, "pause", mode="keep")
        waiting = [threads.submit(text, app, prompt) for prompt in PROMPTS]
        time.sleep(0.5)
        update(app, folder)
        assert app.http.get("/is_paused").json() == {"is_paused": True}
        post(app, "resume")
        assert [one.result() for one in waiting] == by_new

        running = threads.submit(app.complete, PROMPTS[0], max_tokens=1500)
        time.sleep(0.5)
        assert post(app, "abort_requests") == {"status": "aborted", "aborted": 1}
        answer = running.result()
        assert answer.choices[0].finish_reason == "abort"
        assert 0 < answer.usage.completion_tokens < 1500

        running = threads.submit(app.complete, PROMPTS[0], max_tokens=200)
        time.sleep(0.2)
        post(app, "pause", mode="wait")
        assert running.result().usage.completion_tokens == 200
        post(app, "resume")
        assert texts(app) == by_new


def test_a_trainer_that_dies_leaves_a_server_without_weights_or_with_the_old_ones(start_app, tmp_path: Path):
    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)
    *by_old, _ = generated(demo_pair().verifier)
    for journal in (False, True):
        with start_app(f"rollouts-{journal}", rollouts_journal=journal, engine_wait_s=1.0, **GLOO) as app:
            for _ in range(2):
                url = str(app.http.base_url)
                trainer = subprocess.Popen([sys.executable, "-c", _DYING, url, str(folder)], cwd=ROOT)
                assert trainer.wait(60) == -signal.SIGKILL
                assert _abandoned(app)
                if journal:
                    assert texts(app) == by_old
                else:
                    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": NUM_TOKENS}
                    assert app.http.post("/v1/completions", json=body).status_code == 503
            update(app, folder)
            assert texts(app) == by_new


_DYING = """
import os, sys, signal
from safetensors.torch import load_file
from wingbeat.deployments.rollouts.trainer import WeightSender

sender = WeightSender(sys.argv[1])
def dying(tensors):
    for count, pair in enumerate(tensors.items()):
        yield pair
sender.call("start_weight_update")
tensors = load_file(sys.argv[2] + "/model.safetensors")
names = list(tensors)
for name in names[:3]:
    tensor = tensors[name]
    announced = {"names": [name], "dtype_names": [str(tensor.dtype)[6:]], "shapes": [list(tensor.shape)]}
    written = sender._begin("update_weights", update_info=announced)
    sender._group.send(tensor)
    written.result()
tensor = tensors[names[3]]
announced = {"names": [names[3]], "dtype_names": [str(tensor.dtype)[6:]], "shapes": [list(tensor.shape)]}
sender._begin("update_weights", update_info=announced)
import time; time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def _abandoned(app: App) -> bool:
    """Whether the update of a trainer that is gone has ended by itself."""
    for _ in range(100):
        answer = app.http.post("/abort_weight_update")
        if answer.status_code == 409 and "no weight update has started" in answer.text:
            return True
        assert answer.status_code == 409, answer.text
        time.sleep(0.1)
    return False


def test_references_of_ray_go_to_the_engines_by_a_handle(start_app, tmp_path: Path):
    import ray
    from ray import serve

    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)
    held = tensors(folder)
    halves = dict(list(held.items())[:100]), dict(list(held.items())[100:])
    with start_app("rollouts-handle", **GLOO) as app:
        handle = serve.get_app_handle(app.name)
        assert handle.pause.remote(mode="keep").result() == {"status": "paused"}
        handle.start_weight_update.remote().result()
        handle.update_weights.remote([ray.put(half) for half in halves]).result()
        done = handle.finish_weight_update.remote(weight_version="7").result()
        assert done["num_tensors"] == len(held)
        handle.resume.remote().result()
        assert texts(app) == by_new
        assert handle.weight_info.remote().result() == {"weight_version": "7"}
        handle.start_weight_update.remote().result()
        with pytest.raises(Exception, match="'tensors' must be given by name, and not as int"):
            handle.update_weights.remote([ray.put(3)]).result()
        handle.abort_weight_update.remote().result()
        assert texts(app) == by_new


def test_references_of_direct_transport_go_through_the_object_store(start_app, tmp_path: Path):
    import ray
    from ray import serve
    from ray.experimental.collective import create_collective_group

    @ray.remote(num_cpus=0, enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="gloo")
        def weights(self, folder: Path, begin: int, end: int) -> dict:
            from tests.runtime.pushed_folder import tensors

            return dict(list(tensors(folder).items())[begin:end])

    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)
    trainers = [Trainer.remote() for _ in range(2)]
    group = create_collective_group(trainers, backend="gloo")
    try:
        with start_app("rollouts-direct", **GLOO) as app:
            handle = serve.get_app_handle(app.name)
            references = [trainers[0].weights.remote(folder, *part) for part in ((0, 100), (100, 10**6))]
            ray.wait(references, num_returns=2)
            handle.start_weight_update.remote().result()
            handle.update_weights.remote(references).result()
            assert handle.finish_weight_update.remote().result()["num_tensors"] == len(tensors(folder))
            assert texts(app) == by_new
            ray.kill(trainers[0])
            handle.start_weight_update.remote().result()
            with pytest.raises(Exception, match=r"tensors.*transport GLOO, and cannot be fetched"):
                handle.update_weights.remote(references).result()
            handle.abort_weight_update.remote().result()
            assert texts(app) == by_new
    finally:
        del group


def test_a_sleep_gives_memory_back(start_app, tmp_path: Path):
    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)
    *by_old, _ = generated(demo_pair().verifier)
    with start_app("rollouts-asleep", kv_cache_memory_bytes=2**28, **GLOO) as app:
        pid = app.engine()["engine_pid"]
        app.complete(list(range(5, 1500)), max_tokens=8)  # fills some of the pool
        awake = pss(pid)
        post(app, "sleep", level=1)
        asleep = pss(pid)
        post(app, "wake_up")
        assert texts(app) == by_old
        post(app, "sleep", level=2)
        without = pss(pid)
        post(app, "wake_up", tags=["weights"])
        update(app, folder)
        post(app, "wake_up", tags=["kv_cache"])
        assert texts(app) == by_new
    weights = sum(tensor.nbytes for tensor in tensors(folder).values())
    assert awake - asleep > 4 << 20
    assert asleep - without > weights // 2


def pss(pid: int) -> int:
    """Bytes of a process, of those that it shares its part."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)[1]) << 10


def test_a_head_comes_with_the_weights(start_app, tmp_path: Path, until):
    import torch
    from safetensors.torch import save_file

    head = read_tensors(demo_pair().drafter)
    noise = {name: torch.randn_like(held) for name, held in head.items() if held.is_floating_point()}
    save_file(noise, tmp_path / "noise.safetensors")
    save_file({name: head[name] for name in noise}, tmp_path / "own.safetensors")
    *by_old, _ = generated(demo_pair().verifier)

    def accepted(app: App) -> float:
        answer = app.complete(PROMPTS[1])
        metrics = answer.model_extra["metrics"]["speculative_decoding"]
        return metrics["acceptance_length"]

    with start_app("rollouts-head", rollouts_dir=tmp_path / "heads", **GLOO) as app:
        before = accepted(app)
        for file, better in (("noise", False), ("own", True)):
            post(app, "start_draft_weight_update")
            post(app, "update_weights", update_info={"files": [str(tmp_path / f"{file}.safetensors")]})
            post(app, "finish_weight_update")
            until(lambda better=better: (accepted(app) > (1 + before) / 2) == better, 30)
            assert texts(app) == by_old


def test_a_drafter_maps_the_rows_that_the_last_update_has_written(start_app, tmp_path: Path, until):
    """Its head has no embedding of its own."""
    folder = pushed_folder(tmp_path / "step-1")
    *by_new, _ = generated(folder)

    def maps_rows(app: App) -> bool:
        pid = app.engine()["drafter_pid"]
        return "memfd:wingbeat-weights" in Path(f"/proc/{pid}/maps").read_text()

    with start_app("rollouts-rows", **GLOO) as app:
        texts(app)
        assert not maps_rows(app)
        update(app, folder)
        assert texts(app) == by_new
        until(lambda: maps_rows(app), 30)
        killed = app.engine()["drafter_pid"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: app.engine()["drafter_pid"] != killed and app.engine()["drafter_state"] == "attached", 60)
        assert texts(app) == by_new
        until(lambda: maps_rows(app), 30)


def test_the_example_trains_and_every_text_is_that_of_plain_decoding(start_app):
    with start_app("rollouts-example", **GLOO) as app:
        command = [sys.executable, "examples/rollouts.py", "--verify", "--steps", "4"]
        done = subprocess.run(
            [*command, "--url", str(app.http.base_url)],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        steps = re.findall(r"^step (\d): reward ([\d.]+), texts (\w+)", done.stdout, re.M)
        assert [step for step, _, _ in steps] == ["0", "1", "2", "3"]
        assert float(steps[-1][1]) > float(steps[0][1])
