"""Adapters of several models behind one endpoint."""

from tests.deployments.lora.adapter_pool import SERVED, AdapterPool
from tests.deployments.several_models.test_several_at_http import World


def test_an_adapter_is_loaded_onto_the_model_it_names():
    world = World(AdapterPool, of_parts=SERVED)
    path, body = "/v1/load_lora_adapter", {"lora_name": "maid", "lora_path": "good"}
    assert world.ask(path, body).json()["error"]["param"] == "base_model_name"
    taken = world.ask(path, body | {"lora_name": "clerk", "base_model_name": "demo"})
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert world.ask(path, body | {"base_model_name": "demo"}).status_code == 200
    assert world.ask("/v1/completions", {"model": "maid", "prompt": "x"}).json()["choices"][0]["text"] == "from one"
    assert world.ask("/v1/unload_lora_adapter", {"lora_name": "maid"}).status_code == 200
    assert world.ask("/v1/unload_lora_adapter", {"lora_name": "maid"}).status_code == 404
