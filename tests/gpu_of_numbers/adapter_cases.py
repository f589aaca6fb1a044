"""The demo pair with an adapter on the GPU of numbers; in a process of `test_gpu_of_numbers`."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.gpu_of_numbers.pair_cases import FACTORY, NUM_TOKENS, PAIR, SHAPES, config, params, prompts
from tests.runtime.lora_world import merge, write_adapter
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import Request


def test_an_adapter_beside_the_base_model_writes_what_the_merged_model_writes(gpu, tmp_path: Path):
    limits = config(SHAPES["tree"], max_loras=1, max_lora_rank=4)
    llm = LLM(PAIR.verifier, PAIR.drafter, limits, FACTORY, device="cuda", dtype="float32")
    base = AutoModelForCausalLM.from_pretrained(PAIR.verifier, dtype=torch.float32)
    folder = write_adapter(tmp_path / "adapter", base, std=0.12)
    adapter = llm.engine.loaded.parts["adapters"].inspect("adapter", folder)
    prompt, wanted = prompts(llm)[1], params("greedy", force_drafts=True)
    requests = [Request("base", tuple(prompt), wanted), Request("adapted", tuple(prompt), wanted, variant=adapter)]
    found: dict[str, list[int]] = {name: [] for name in ("base", "adapted", "alone")}

    def finish(requests: list[Request]) -> int:
        """Number of adapter kernels launched until all requests have ended."""
        before = gpu.launches["_shrink_kernel"]
        for request in requests:
            llm.engine.add_request(request)
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                found[output.request_id] += output.token_ids
        return gpu.launches["_shrink_kernel"] - before

    assert finish(requests) > 0
    assert finish([replace(requests[0], request_id="alone")]) == 0
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}

    def written(model: PreTrainedModel) -> list[int]:
        return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()

    assert found["base"] == found["alone"] == written(base)
    assert found["adapted"] == written(merge(base, folder))
    assert found["base"] != found["adapted"]
