"""Fixtures of this folder: a tiny checkpoint for all tests, and a fake of Ray."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, with its tokenizer, as a checkpoint folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    entries = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(entries),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def wingbeat(capsys: pytest.CaptureFixture[str]):
    """Run the command; returns exit code, stdout and stderr."""
    from wingbeat.deployments.cli import main as cli

    def run(*args: str):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(args))
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch):
    """Puts a `FakeRay` in Ray's and Serve's place; this process's own handlers come back afterwards."""
    from tests.deployments.fake_ray import FakeRay
    from wingbeat.deployments import launch, ray_cluster
    from wingbeat.deployments.parts import first_result

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def install(**options: object) -> FakeRay:
        fake = FakeRay(**options)
        monkeypatch.setattr(launch, "ray", fake)
        monkeypatch.setattr(launch, "ray_worker", fake.worker)
        monkeypatch.setattr(launch, "serve", fake)
        monkeypatch.setattr(launch, "_get_global_client", lambda: SimpleNamespace(http_config=fake.listens))
        monkeypatch.setattr(launch, "build_at", lambda config, door: door)
        monkeypatch.setattr(launch, "first_result", first)
        monkeypatch.setattr(launch, "global_worker_stdstream_dispatcher", fake.dispatcher)
        monkeypatch.setattr(ray_cluster, "ray", fake)
        monkeypatch.setattr(ray_cluster, "address_to_join", lambda address: address or ray_cluster.LOCAL)
        monkeypatch.setattr(ray_cluster, "PROCESS_GRACE_S", 0.0)
        monkeypatch.setattr(ray_cluster, "descendants", lambda pid: [])
        monkeypatch.setattr(launch, "hooks", lambda name: ())  # which would ask Ray for its GPUs
        monkeypatch.setattr(launch, "POLL_S", 0.01)
        monkeypatch.setattr(launch, "PROCESS_GRACE_S", 0.0)
        monkeypatch.setattr(launch, "descendants", lambda pid: [])
        monkeypatch.setattr(launch, "remove_stale_segments", lambda: 0)
        return fake

    def first(name: str, *given: object) -> object:
        """A hook's result; doors are at a port that is free, unless a test asks for one, and nothing guards Ray."""
        if name == "guard_ray":
            return None
        return first_result(name, *((given[0], 0) if name == "open_door" and given[1] == 8000 else given))

    monkeypatch.setenv(launch.NICENESS, "0")
    yield install
    for number, handler in handlers.items():
        signal.signal(number, handler)
