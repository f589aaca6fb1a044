"""Devices, memory and graphs of the GPU of numbers; in a process of `test_gpu_of_numbers`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaConfig, Qwen3MoeConfig, modeling_utils

from tests.gpu_of_numbers.cards import CARDS
from tests.gpu_of_numbers.device import CUDA, on_host
from tests.gpu_of_numbers.graphs import NumberGraph, StaleAddressError
from tests.runtime.models import SHAPE
from wingbeat.kernels.layer.reference import silu_mul
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.protocol.transfer import Download, upload
from wingbeat.runtime.verifier.checkpoints.checkpoint import load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.layers.linears import widen_logits

MODES: dict[str, Callable[[], Any]] = {"grad": nullcontext, "no-grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture
def graphs(gpu):
    return CudaGraphDevice(CUDA)


@pytest.fixture(autouse=True)
def without_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("mode", MODES)
def test_torch_computes_on_it_what_it_computes_on_the_host(gpu, mode):
    with torch.inference_mode(False), MODES[mode]():
        layer, values = nn.Linear(8, 4), torch.randn(3, 8)
        expected = torch.softmax(layer(values), -1).sort().values
        layer.to(CUDA)
        found = torch.softmax(layer(values.to(CUDA)), -1).sort().values
    assert found.device == layer.weight.device == CUDA
    assert torch.equal(found.detach().cpu(), expected.detach())


def test_views_and_what_is_written_through_them_are_one_memory(gpu):
    whole = torch.zeros(4, 6, device=CUDA)
    whole[1:3, ::2].view(-1, 3).t().fill_(2.0)
    whole[torch.tensor([0], device=CUDA)] = 1.0
    torch.add(whole[0], 1, out=whole[3])
    assert whole.cpu().tolist() == [[1] * 6, [2, 0] * 3, [2, 0] * 3, [2] * 6]
    assert on_host(whole).data_ptr() == whole.data_ptr()


def test_host_and_device_do_not_mix(gpu):
    here, there = torch.ones(4), torch.ones(4, device=CUDA)
    for call in (lambda: there + here, lambda: there.copy_(there).index_select(0, torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="same device"):
            call()
    with pytest.raises(RuntimeError, match="on the host"):
        silu_mul_on_the_host(there)
    assert (there + torch.tensor(2.0)).cpu().tolist() == [3.0] * 4


def silu_mul_on_the_host(there: torch.Tensor) -> None:
    from wingbeat.kernels.gpu.layer import _silu_mul_kernel

    _silu_mul_kernel[(1,)](there, torch.ones(2), there)


def test_memory_is_counted_and_a_card_has_an_end(gpu):
    card = next(card for card in CARDS.values() if card.name == torch.cuda.get_device_name())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
    del kept
    kept = torch.zeros(1 << 18, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated() - before == kept.nbytes
    assert torch.cuda.max_memory_allocated() - before == 1 << 20
    free, total = torch.cuda.mem_get_info()
    assert total == card.total_memory
    large = torch.zeros(free - (1 << 30), dtype=torch.uint8, device=CUDA)
    assert int(large[-1]) == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 31, dtype=torch.uint8, device=CUDA)


def test_a_checkpoint_is_converted_and_stacked_on_the_device_without_a_block_for_all_of_it(gpu, tmp_path, monkeypatch):
    """Experts are files' tensors one by one; the model holds them as one."""
    blocks: list[Any] = []
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", warm_up := lambda *args: blocks.append(args))
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    written = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    written.save_pretrained(tmp_path)
    file = ConfigFile.read(tmp_path)
    loaded, expected = (load_weights(file, torch.bfloat16, device=torch.device(where)) for where in (CUDA, "cpu"))
    assert all(tensor.is_cuda for tensor in (*loaded.parameters(), *loaded.buffers()))
    for ours, theirs in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours.cpu(), theirs)
    assert not blocks
    assert modeling_utils.caching_allocator_warmup is warm_up


def test_fresh_memory_shows_where_it_is_read(gpu):
    assert torch.empty(5, device=CUDA).isnan().all()
    assert (torch.empty(5, dtype=torch.int64, device=CUDA) < 0).all()


def test_a_kernel_of_triton_runs_on_its_memory(gpu):
    gate_up = torch.randn(5, 64)
    count = gpu.launches["_silu_mul_kernel"]
    found = silu_mul(gate_up.to(CUDA))
    torch.testing.assert_close(found.cpu(), silu_mul(gate_up))
    assert gpu.launches["_silu_mul_kernel"] == count + 1


def capture(graphs: CudaGraphDevice, function: Callable[[], Any], pool: Any = None) -> tuple[NumberGraph, Any]:
    graphs.warm_up(function)
    return graphs.capture(function, pool or graphs.new_pool())


def test_a_replay_computes_on_what_lies_in_the_same_memory_by_now(gpu, graphs):
    given, kept = torch.randn(3, 32, device=CUDA), torch.zeros(3, device=CUDA)

    def stage() -> torch.Tensor:
        made = silu_mul(given)
        kept.add_(made.sum(1))
        return made * 2

    graph, result = capture(graphs, stage)
    kept.zero_()
    given.copy_(torch.randn(3, 32))
    graph.replay()
    torch.testing.assert_close(result.cpu(), silu_mul(given.cpu()) * 2)
    torch.testing.assert_close(kept.cpu(), silu_mul(given.cpu()).sum(1))


def test_a_graph_of_memory_that_is_gone_is_an_error(gpu, graphs):
    held = [torch.ones(8, device=CUDA)]
    graph, result = capture(graphs, lambda: held[0].view(2, 4) * 3)
    graph.replay()
    assert result.sum().item() == 24
    held[0] = torch.ones(8, device=CUDA)
    with pytest.raises(StaleAddressError, match="mul is given memory that has been freed"):
        graph.replay()


HOST_WORK: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).any()),
    "list": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "download": lambda x: Download([x.long()]).wait(),
    "upload": lambda x: upload([1, 2], CUDA),
    "new-tensor": lambda x: torch.tensor([1, 2], device=CUDA),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("name", HOST_WORK)
def test_work_of_the_host_ends_a_capture(gpu, graphs, name):
    given = torch.ones(4, device=CUDA)

    def stage() -> torch.Tensor:
        HOST_WORK[name](given)
        return given + 1

    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        capture(graphs, stage)
    assert "not permitted when stream is capturing" in str(raised.value.__cause__)
    graph, result = capture(graphs, lambda: given + 2)
    graph.replay()
    assert result.sum().item() == 12


def test_a_replay_ruins_what_later_graphs_of_its_pool_had_returned(gpu, graphs):
    given, pool = torch.ones(1, 4, device=CUDA), graphs.new_pool()
    first, one = capture(graphs, lambda: given + 1, pool)
    second, two = capture(graphs, lambda: silu_mul(given) + one[:, :2], pool)
    first.replay()
    assert two.isnan().all()
    assert given.cpu().tolist() == [[1.0] * 4], "what no graph has made stays"
    second.replay()
    torch.testing.assert_close(two.cpu(), silu_mul(torch.ones(1, 4)) + 2)


LOGITS = {
    "capped": Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "scaled": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "tied": LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
}
"""Configurations by treatment of the output matrix's products."""


@pytest.mark.parametrize("name", LOGITS)
def test_logits_of_half_precision_leave_float32_and_are_treated_as_before(gpu, name):
    with torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LOGITS[name], dtype=torch.bfloat16).eval().to(CUDA)
        model.set_attn_implementation("eager")
        head, token_ids = model.get_output_embeddings(), torch.arange(3, 9, device=CUDA)[None]
        narrow = model(input_ids=token_ids, use_cache=False).logits
        hook = head.register_forward_hook(lambda module, args, out: args[0].float() @ module.weight.float().t())
        expected = model(input_ids=token_ids, use_cache=False).logits
        hook.remove()
        assert widen_logits(model)
        found = model(input_ids=token_ids, use_cache=False).logits
    assert (narrow.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.cpu(), expected.cpu())
    torch.testing.assert_close(found.cpu(), narrow.cpu().float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(found.cpu(), narrow.cpu().float()), "which is rounded"
