"""Gemma 4's assistants, for tests of every kind of drafter."""

from pathlib import Path

import torch
from transformers import Gemma4TextConfig

from tests.runtime.assistants.test_shared_kv import build, saved
from tests.runtime.fake_gpu import CUDA, place
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import IDS, NUM_LAYERS, SHAPE
from tests.runtime.gpu_world import VOCAB_SIZE as GPU_VOCAB_SIZE
from tests.runtime.loaded_kind import Kind, of_folder
from tests.runtime.models import CHAIN
from wingbeat.runtime.assistants.shared_kv_drafter import SharedKvDrafter
from wingbeat.runtime.assistants.shared_kv_head import SharedKvHead
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.kv.pool import LayerAttention


def shared_keys(folder: Path) -> Kind:
    verifier, head = saved(folder)
    return of_folder(verifier, str(head))


def captured(new_folder):
    eager = build(saved(new_folder("gemma4")), CHAIN)
    parts = eager.head, dict(zip(eager.types, eager.needs.kv_layers, strict=True)), eager.pool.layers
    return lambda speculation, device: SharedKvDrafter(*parts, speculation, 6, device)


def folders(root: Path) -> tuple[Path, str]:
    verifier, head = saved(root)
    return verifier, str(head)


def on_fake_gpu(speculation: SpeculationConfig, device: FakeGraphDevice | None, num_layers: int) -> SharedKvDrafter:
    """Build a head over the keys and values of the verifier's last layer; all of its layers have full attention."""
    fields = dict(SHAPE, global_head_dim=SHAPE["head_dim"], num_hidden_layers=num_layers)
    fields |= {"layer_types": ["full_attention"] * num_layers, "num_kv_shared_layers": num_layers}
    config = Gemma4TextConfig(
        **fields, **IDS, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, enable_moe_block=False
    )
    head = place(SharedKvHead(config, SHAPE["hidden_size"]).to(torch.bfloat16))
    head.lend(torch.empty(GPU_VOCAB_SIZE, SHAPE["hidden_size"], dtype=torch.bfloat16, device=CUDA), 8.0)
    layer = LayerAttention(SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], 16, 16, None)
    kv_layers = {"full_attention": NUM_LAYERS - 1}
    return SharedKvDrafter(head.eval(), kv_layers, [layer], speculation, NUM_LAYERS, device)


KINDS = {"shared_keys": shared_keys}
CAPTURED = {"shared_keys": captured}
FOLDERS = {"shared_keys": folders}
ON_FAKE_GPU = {"shared_keys": on_fake_gpu}
