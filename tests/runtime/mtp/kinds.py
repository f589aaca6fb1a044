"""MTP modules, for tests of every kind of drafter."""

from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.runtime.fake_gpu import place
from tests.runtime.gpu_world import IDS, SHAPE
from tests.runtime.gpu_world import NUM_LAYERS as NUM_GPU_LAYERS
from tests.runtime.loaded_kind import Kind, of_folder
from tests.runtime.mtp.mtp_world import NUM_LAYERS, Modules
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.mtp.mtp_drafter import MtpDrafter
from wingbeat.runtime.mtp.mtp_loader import load_mtp_modules
from wingbeat.runtime.mtp.mtp_modules import MtpModules


def mtp(folder: Path) -> Kind:
    Modules.random("glm4_moe", 2).save(folder)
    return of_folder(folder, "mtp")


def captured(family: str, count: int, new_folder):
    folder = new_folder(f"{family}-{count}")
    Modules.random(family, count).save(folder)
    modules = load_mtp_modules(TargetDescription.from_checkpoint(folder))
    return lambda speculation, device: MtpDrafter(modules, speculation, NUM_LAYERS, device)


def folders(root: Path) -> tuple[Path, str]:
    """The third module looks further ahead than the shortest sequence is long."""
    Modules.random("qwen3", 3).save(root)
    return root, "mtp"


def mtp_modules(count: int = 2) -> MtpModules:
    """Modules of the verifier's own layers on the fake GPU."""
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPE, **IDS, num_hidden_layers=NUM_GPU_LAYERS), dtype=torch.bfloat16
        )
        modules = MtpModules(model, count).to(torch.bfloat16)
    for module in modules.items:
        module.embedding, module.head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
    modules.prepare()
    return place(modules)


def on_fake_gpu(speculation, device, num_layers):
    return MtpDrafter(mtp_modules(), speculation, NUM_GPU_LAYERS, device)


KINDS = {"mtp": mtp}
CAPTURED = {"mtp-1": partial(captured, "glm4_moe", 1), "mtp-3": partial(captured, "deepseek_v3", 3)}
FOLDERS = {"mtp": folders}
ON_FAKE_GPU = {"mtp": on_fake_gpu}
