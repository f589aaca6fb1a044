"""Files that were written for Ray Serve LLM, deployed with another import_path and asked."""

import copy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.operators_cluster import START_S, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "ray_llm"
RAYS, OURS = "ray.serve.llm:build_openai_app", "wingbeat.deployments.ray_llm:build_openai_app"


def with_our_door(cluster: Cluster, name: str) -> dict[str, Any]:
    """The example as Ray Serve LLM would have it, but for its import_path, and the test's own port."""
    rays = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text().replace(OURS, RAYS))
    ours = copy.deepcopy(rays)
    for application in ours["applications"]:
        assert application["import_path"] == RAYS
        application["import_path"] = OURS
    return ours | {"http_options": {"host": "127.0.0.1", "port": cluster.port}}


def chat(cluster: Cluster, model: str, prefix: str = "", **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "def main("}], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{cluster.url}{prefix}/v1/chat/completions", json=body | fields, timeout=START_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_file_of_ray_serve_llm_is_served_behind_our_door_and_speculates(cluster: Cluster, tmp_path: Path):
    cluster.deploy(with_our_door(cluster, "demo"), tmp_path)
    cluster.wait_until_it_runs()
    answer = chat(cluster, "demo")
    plain = chat(cluster, "demo", speculation={"enabled": False})
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert answer["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
    assert (
        "num_accepted_tokens" not in (plain.get("metrics") or {}).get("speculative_decoding", {})
        or not plain["metrics"]["speculative_decoding"]["num_accepted_tokens"]
    )
    (card,) = httpx.get(f"{cluster.url}/v1/models", timeout=START_S).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("demo", 1024)


def test_another_deployment_calls_the_application_by_its_handle(cluster: Cluster, tmp_path: Path):
    document = with_our_door(cluster, "demo")
    caller = {"name": "caller", "route_prefix": "/caller", "import_path": "tests.e2e.calling_application:app"}
    document["applications"].append(caller)
    cluster.deploy(document, tmp_path)
    cluster.wait_until_it_runs()
    got = httpx.post(f"{cluster.url}/caller", json={"prompt": "def main("}, timeout=START_S)
    assert got.status_code == 200, got.text
    answer = got.json()
    text = answer["generate"]["choices"][0]["text"]
    assert text
    assert answer["streamed"] == text
    assert answer["chat"]["choices"][0]["message"]["content"] == answer["streamed_chat"]
    assert answer["error"] == [404, "model"]


def test_two_models_behind_one_endpoint_are_chosen_by_name(cluster: Cluster, tmp_path: Path):
    cluster.deploy(with_our_door(cluster, "one_endpoint"), tmp_path)
    cluster.wait_until_it_runs()
    cards = httpx.get(f"{cluster.url}/v1/models", timeout=START_S).json()["data"]
    assert [card["id"] for card in cards] == ["demo", "small"]
    texts = {
        name: chat(cluster, name, ignore_eos=True)["choices"][0]["message"]["content"] for name in ("demo", "small")
    }
    assert texts["demo"] != texts["small"]
    assert (
        texts["demo"]
        == chat(cluster, "demo", ignore_eos=True, speculation={"enabled": False})["choices"][0]["message"]["content"]
    )
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=START_S).text
    for name in texts:
        assert 'wingbeat_engine_up{engine="' in metrics
        assert f'model_name="{name}"' in metrics
    assert httpx.get(f"{cluster.url}/health", timeout=START_S).json()["models"] == dict.fromkeys(texts, "ok")
    nameless = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "x"}, timeout=START_S)
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")


def test_two_applications_serve_two_models_on_one_cluster(cluster: Cluster, tmp_path: Path):
    cluster.deploy(with_our_door(cluster, "two_models"), tmp_path)
    cluster.wait_until_it_runs()
    texts = {
        name: chat(cluster, name, f"/{name}", ignore_eos=True)["choices"][0]["message"]["content"]
        for name in ("demo", "small")
    }
    assert all(texts.values())
    assert texts["demo"] != texts["small"]
    body = {"model": "demo", "prompt": "x"}
    wrong = httpx.post(f"{cluster.url}/small/v1/completions", json=body, timeout=START_S)
    assert wrong.status_code == 404
