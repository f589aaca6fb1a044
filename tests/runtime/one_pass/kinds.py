"""Heads that draft in one pass, for tests of every kind of drafter."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.runtime.fake_gpu import CUDA, place
from tests.runtime.gpu_world import SHAPE
from tests.runtime.gpu_world import VOCAB_SIZE as GPU_VOCAB_SIZE
from tests.runtime.loaded_kind import Kind, llama
from tests.runtime.models import HIDDEN_SIZE, VOCAB_SIZE, reference
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.one_pass.config import LatticeConfig, LayerMask, MarkovConfig, MarkovKind, OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter, ParallelEagleDrafter
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead, load_parallel_head

_ANY_TARGET = SimpleNamespace(
    hidden_size=HIDDEN_SIZE, num_layers=4, vocab_size=VOCAB_SIZE, embedding=lambda: None, lm_head=lambda: None
)
_LAYERS = ["sliding_attention", "full_attention"]
_MASKED = {"dflash": {"layer_types": _LAYERS, "sliding_window": 8}}


def one_pass(family: str, folder: Path) -> Kind:
    """A head of DFlash's body, of two layers, with a block of more slots than are drafted."""
    ref, target = llama(folder / "verifier")
    raw = raw_config(family, (0, 1, 2), num_layers=2, block_size=10)
    return Kind(ref, target, str(save_head(folder / "head", raw, random_tensors(raw))))


def parallel_eagle(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    raw = parallel_config((1, 2, 3), num_layers=2)
    return Kind(ref, target, str(save_head(folder / "head", raw, parallel_tensors(raw))))


def captured(family: str, new_folder):
    raw = raw_config(family, (0, 2), num_layers=2, block_size=9, **_MASKED.get(family, {}))
    checkpoint = read_one_pass_checkpoint(save_head(new_folder(family), raw, random_tensors(raw)))
    head = load_one_pass_head(checkpoint, _ANY_TARGET, torch.float32, "cpu")
    return lambda speculation, device: OnePassDrafter(head, speculation, device)


def captured_parallel(new_folder):
    raw = parallel_config((0, 2), num_layers=2)
    checkpoint = read_one_pass_checkpoint(save_head(new_folder("p-eagle"), raw, parallel_tensors(raw)))
    head = load_parallel_head(checkpoint, _ANY_TARGET, torch.float32, "cpu")
    return lambda speculation, device: ParallelEagleDrafter(head, speculation, device)


def folders(family: str, root: Path) -> tuple[Path, str]:
    reference("llama").loaded.model.save_pretrained(root / "verifier")
    if family == "p-eagle":
        raw = parallel_config((1, 3), num_layers=2)
        save_head(root / "drafter", raw, parallel_tensors(raw))
    else:
        raw = raw_config(family, (0, 2), num_layers=2, block_size=4, layer_types=_LAYERS, sliding_window=5)
        save_head(root / "drafter", raw, random_tensors(raw))
    return root / "verifier", str(root / "drafter")


def one_pass_head(kind: str) -> OnePassHead | ParallelEagleHead:
    """A head of two layers in bfloat16 that drafts in one pass, for `verifier` on the fake GPU."""
    shape = dict(SHAPE, target_hidden_size=SHAPE["hidden_size"], draft_vocab_size=GPU_VOCAB_SIZE)
    if kind == "p-eagle":
        head = ParallelEagleHead(EagleHeadConfig(**shape, tap_layers=(0, 1), num_layers=2), mask_token_id=3)
    else:
        families = {"dflash": OnePassFamily.DFLASH, "dspark": OnePassFamily.DSPARK, "dflash2": OnePassFamily.DFLASH2}
        config = OnePassConfig(
            **shape,
            family=families[kind],
            slots=Slots.SHIFT if kind == "dspark" else Slots.FILL_IN,
            block_size=8,
            masks=(LayerMask(True, 8), LayerMask()),
            tap_layers=(0, 1),
            mask_token_id=3,
            markov=MarkovConfig(8, MarkovKind.RNN, True) if kind == "dspark" else None,
            lattice=LatticeConfig(2, 16, 8, 6) if kind == "dflash2" else None,
        )
        head = OnePassHead(config)
    place(head.to(torch.bfloat16))
    head.reset_rope(CUDA)
    return head.eval()


def on_fake_gpu(kind, speculation, device, num_layers):
    drafter = ParallelEagleDrafter if kind == "p-eagle" else OnePassDrafter
    return drafter(one_pass_head(kind), speculation, device)


KINDS = {
    "dflash": partial(one_pass, "dflash"),
    "jetspec": partial(one_pass, "jetspec"),
    "dspark": partial(one_pass, "dspark-rnn"),
    "dflash2": partial(one_pass, "dflash2"),
    "peagle": parallel_eagle,
}
CAPTURED = {
    "p-eagle": captured_parallel,
    **{name: partial(captured, name) for name in ("dflash", "dspark-rnn", "dflash2")},
}
FOLDERS = {name: partial(folders, name) for name in ("p-eagle", "dflash", "dspark-rnn", "dflash2")}
ON_FAKE_GPU = {name: partial(on_fake_gpu, name) for name in ("p-eagle", "dflash", "dspark", "dflash2")}
