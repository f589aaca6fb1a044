"""On its way to a GPU, a checkpoint passes through host memory tensor by tensor; the GPU of shapes holds none of it."""

import ctypes
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from tests.runtime.gpu_world import llama
from wingbeat.runtime.verifier.checkpoints.checkpoint import load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """The structure mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def allocated_bytes() -> int:
    """Allocated host memory; weights that are read lie in the pages of their file and are not included."""
    LIBC.mallinfo2.restype = Mallinfo
    found = LIBC.mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="glibc counts what is allocated")
def test_host_memory_holds_a_few_tensors_at_a_time(gpu, tmp_path, monkeypatch):
    # The GPU of shapes is known to the test's own thread alone.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    config = llama(12)
    config.hidden_size, config.intermediate_size = 512, 1536
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size // 2
    upload, held, before = gpu._upload, [], allocated_bytes()
    monkeypatch.setattr(gpu, "_upload", lambda source: (held.append(allocated_bytes()), upload(source)))
    model = load_weights(ConfigFile.read(tmp_path), torch.bfloat16, device=torch.device("cuda", 0))
    parameters = list(model.parameters())
    assert {(one.device.type, one.dtype) for one in parameters} == {("cuda", torch.bfloat16)}
    assert len(held) >= len(parameters)
    assert max(held) - before < num_bytes / 4
