"""Draft models of another vocabulary, for tests of every kind of drafter."""

from functools import partial
from pathlib import Path

import torch

from tests.runtime.draft_model.checkpoints import save, words
from tests.runtime.gpu_world import VOCAB_SIZE as ON_GPU
from tests.runtime.gpu_world import verifier
from tests.runtime.loaded_kind import Kind, llama
from tests.runtime.models import VOCAB_SIZE, random_model
from wingbeat.runtime.draft_model.model_drafter import ModelDrafter
from wingbeat.runtime.heads.vocabulary import SharedTokens
from wingbeat.runtime.verifier.loading.loader import prepare_model

NUM_SHARED, DRAFT_SIZE = 80, 112


def foreign_words() -> dict[str, int]:
    """Most of the verifier's tokens under other ids, and some that the verifier lacks."""
    ids = torch.randperm(DRAFT_SIZE, generator=torch.Generator().manual_seed(5)).tolist()
    names = [f"t{i}" for i in range(NUM_SHARED)] + [f"u{i}" for i in range(DRAFT_SIZE - NUM_SHARED)]
    return dict(zip(names, ids, strict=True))


def foreign_vocabulary(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    save(ref.loaded.model, folder / "verifier", words(VOCAB_SIZE))
    model = random_model("llama", num_hidden_layers=1, vocab_size=DRAFT_SIZE)
    return Kind(ref, target, str(save(model, folder / "draft", foreign_words())))


def folders(root: Path) -> tuple[Path, str]:
    kind = foreign_vocabulary(root)
    return kind.target.path, kind.source


def shared(target_size: int, num_shared: int) -> SharedTokens:
    """Tables by which the draft ids of the first tokens are those of the verifier backwards."""
    target_ids = torch.arange(num_shared)
    draft_ids = torch.cat([target_ids.flip(0), torch.zeros(target_size - num_shared, dtype=torch.int64)])
    return SharedTokens(draft_ids, draft_ids[target_ids], target_ids)


def captured(new_folder):
    loaded = prepare_model(random_model("llama", num_hidden_layers=2, vocab_size=DRAFT_SIZE), "llama")
    return partial(_drafter, loaded, shared(VOCAB_SIZE, NUM_SHARED))


def on_fake_gpu(speculation, device, num_layers):
    return _drafter(verifier(num_layers), shared(ON_GPU, ON_GPU - 8), speculation, device)


def _drafter(loaded, tables, speculation, device):
    return ModelDrafter(loaded, speculation, None, device, tables)


KINDS = {"foreign_vocabulary": foreign_vocabulary}
CAPTURED = {"foreign-vocabulary": captured}
FOLDERS = {"foreign-vocabulary": folders}
ON_FAKE_GPU = {"foreign-vocabulary": on_fake_gpu}
