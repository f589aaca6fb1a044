"""Checkpoints by their names on the hub, from a cache laid out as huggingface_hub lays it out; no network."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from wingbeat.runtime import hub
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import FALLBACK, parse_drafter
from wingbeat.runtime.hub import HubError, HubName, checkpoint_folder

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a machine that is offline."""
    hub._fetch.cache_clear()
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def put(cache: Path, name: str, source: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    """Lay a checkpoint into the cache; returns its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/name", ("org/name", None)),
        ("Qwen/Qwen3-0.6B@refs/pr/1", ("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("org/name@" + COMMIT, ("org/name", COMMIT)),
        ("name", None),
        ("/org/name", None),
        ("../name", None),
        ("a/b/c", None),
        ("package.module.Class", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths_and_classes(source, name):
    assert HubName.parse(source) == (None if name is None else HubName(*name))


def test_a_name_is_its_snapshot_in_the_cache(cache: Path):
    main = put(cache, "org/tiny", demo_pair().drafter)
    older = put(cache, "org/tiny", demo_pair().drafter, OLDER, "v1")
    assert checkpoint_folder("org/tiny") == main
    assert checkpoint_folder(Path("org/tiny@v1")) == older
    assert checkpoint_folder("org/tiny@" + OLDER) == older


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path):
    put(cache, "org/tiny", demo_pair().drafter)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert checkpoint_folder("org/tiny") == Path("org/tiny")


def test_a_drafter_may_have_a_name_of_the_hub(cache: Path):
    snapshot = put(cache, "org/head", demo_pair().drafter)
    choice = parse_drafter("org/head", None)
    assert (choice.source, choice.label, choice.has_weights) == (snapshot, "head", True)


def test_auto_looks_into_the_models_snapshot(cache: Path):
    put(cache, "org/tiny", demo_pair().verifier)
    assert parse_drafter("auto", Path("org/tiny")) == FALLBACK


@pytest.mark.parametrize("source", ["org/absent", "org/absent@v1"])
def test_offline_without_a_copy_says_what_to_do(cache: Path, source: str):
    with pytest.raises(HubError) as caught:
        checkpoint_folder(source)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in (source, str(cache), "HF_HUB_OFFLINE", "hf download org/absent", "folder"))


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None)


FAILURES = {
    "gated": (errors.GatedRepoError, "HF_TOKEN"),
    "unknown": (errors.RepositoryNotFoundError, "check the name"),
    "revision": (errors.RevisionNotFoundError, "no branch, tag or commit 'v9'"),
    "no network": (errors.LocalEntryNotFoundError, "the hub cannot be reached: run `hf download org/name`"),
    "disk full": (OSError, "cannot be fetched: OSError: no space"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_fetch_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch):
    kind, says = FAILURES[case]
    error = kind.__new__(kind)
    error.args = ("no\nspace",)

    def fail(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HubError) as caught:
        checkpoint_folder("org/name@v9")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


class FakeHub:
    """Fetches the files of a repository that the patterns allow, as `snapshot_download` does."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.files = files
        self.num_calls = 0

    def snapshot_download(self, name: str, revision=None, allow_patterns=(), ignore_patterns=()) -> str:
        from huggingface_hub.utils import filter_repo_objects

        self.num_calls += 1
        for file in filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({}))
        return str(self.folder)

    def fetched(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


FILES = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "modeling_tiny.py",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "onnx/config.json",
]


def test_pickles_and_code_are_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeHub(tmp_path / "copy", FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    checkpoint_folder("org/name", with_weights=False)
    assert fake.fetched() == set(FILES[:7]) - {FILES[1]}
    checkpoint_folder("org/name")
    assert fake.fetched() == set(FILES[:7])


def test_a_process_asks_the_hub_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeHub(tmp_path / "copy", FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    assert checkpoint_folder("org/name") == checkpoint_folder(Path("org/name")) == tmp_path / "copy"
    assert fake.num_calls == 1


def test_a_repository_of_pickles_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeHub(tmp_path / "copy", ["config.json", "pytorch_model.bin"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    with pytest.raises(HubError, match="no safetensors"):
        checkpoint_folder("org/name")
