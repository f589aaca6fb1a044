"""Draft models, for tests of every kind of drafter."""

from pathlib import Path

from tests.runtime.gpu_world import verifier
from tests.runtime.loaded_kind import Kind, llama
from tests.runtime.models import VOCAB_SIZE, random_model, reference
from wingbeat.runtime.draft_model.model_drafter import ModelDrafter
from wingbeat.runtime.verifier.loading.loader import prepare_model

_SMALL = {"num_hidden_layers": 2}
_WINDOWS = _SMALL | {"layer_types": ["sliding_attention", "full_attention"]}


def draft_model(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    random_model("llama", **_SMALL).save_pretrained(folder / "small")
    return Kind(ref, target, str(folder / "small"))


def captured(new_folder):
    loaded = prepare_model(random_model("llama", **_SMALL), "llama")
    return lambda speculation, device: ModelDrafter(loaded, speculation, VOCAB_SIZE, device)


def captured_windows(new_folder):
    loaded = prepare_model(random_model("gemma3", **_WINDOWS), "gemma3")
    return lambda speculation, device: ModelDrafter(loaded, speculation, None, device)


def folders(root: Path) -> tuple[Path, str]:
    reference("llama").loaded.model.save_pretrained(root / "verifier")
    random_model("llama", num_hidden_layers=1).save_pretrained(root / "drafter")
    return root / "verifier", str(root / "drafter")


def on_fake_gpu(speculation, device, num_layers):
    return ModelDrafter(verifier(num_layers), speculation, graph_device=device)


KINDS = {"draft_model": draft_model}
CAPTURED = {"draft-model": captured, "draft-model-windows": captured_windows}
FOLDERS = {"draft-model": folders}
ON_FAKE_GPU = {"draft-model": on_fake_gpu}
