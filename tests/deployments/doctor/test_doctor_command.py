"""`wingbeat doctor`: every part has its line, whatever the others do, and a failure is an exit code."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.cluster import fake_nvml
from tests.cluster.fake_nvml import device
from tests.deployments.cli.test_planted_code import VERIFIER, plant, trace  # noqa: F401 - a fixture
from tests.deployments.cli.test_planted_code import run as planted_run  # noqa: F401 - a fixture
from tests.optional import is_gone
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.deployments import parts
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.doctor import command, driver, gpu
from wingbeat.deployments.doctor.examination import Part, Verdict, examine
from wingbeat.deployments.doctor.machine import machine_parts
from wingbeat.runtime import free_memory


def fine() -> tuple[Verdict, str]:
    return Verdict.OK, "it is [there]"


def raises() -> tuple[Verdict, str]:
    raise RuntimeError("CUDA error: no kernel image\nis available")


def run(capsys, *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *args])
    return ended.value.code, capsys.readouterr().out


def test_a_part_that_raises_or_hangs_fails_alone(hang):
    parts = [Part("a", 5, raises), Part("b", 0.3, hang), Part("c", 5, fine)]
    a, b, c = examine(parts)
    assert (a.verdict, a.detail) == (Verdict.FAILED, "RuntimeError: CUDA error: no kernel image")
    assert b.verdict is Verdict.FAILED
    assert "b takes longer than" in b.detail
    assert c[:3] == ("c", Verdict.OK, "it is [there]")


@pytest.mark.parametrize(("ask", "code"), [(fine, 0), (raises, 1)])
def test_a_failed_part_is_exit_code_1(monkeypatch, capsys, ask, code):
    monkeypatch.setattr(command, "machine_parts", lambda: [Part("part", 5, ask)])
    monkeypatch.setattr(command, "gpu_parts", lambda seen: [])
    found, out = run(capsys, "--no-load")
    assert found == code
    (line,) = out.splitlines()
    assert line.endswith("it is [there]" if code == 0 else "RuntimeError: CUDA error: no kernel image")
    _, out = run(capsys, "--no-load", "--json")
    assert [part["verdict"] for part in json.loads(out)] == ["ok" if code == 0 else "failed"]


@pytest.mark.slow
def test_this_machine_is_examined_and_the_demo_pair_writes(capsys):
    code, out = run(capsys, "--json")
    found = {part["part"]: part for part in json.loads(out)}
    assert code == 0
    assert list(found) == [
        name
        for name in ("versions", "processor", "memory", "CPU kernels", "GPU", "model", "round")
        if not is_gone(name)
    ]
    assert "wingbeat" in found["versions"]["detail"]
    assert "16 tokens written, drafter accepted" in found["model"]["detail"]
    assert "cpu's copy rate of " in found["round"]["detail"]


def test_little_shared_memory_is_told_with_the_option_of_containers(monkeypatch):
    monkeypatch.setattr(free_memory, "free_shared_memory", lambda: 64 << 20)
    (memory,) = (part for part in machine_parts() if part.name == "memory")
    verdict, detail = memory.ask()
    assert verdict is Verdict.WARNING
    assert "--shm-size=2g" in detail


def test_graphs_that_stay_unused_are_told(monkeypatch):
    graphs = SimpleNamespace(pool=SimpleNamespace(paused=True), stats=SimpleNamespace(captured=[1, 2], failed=[]))
    loaded = SimpleNamespace(name="m", dtype="torch.bfloat16", device="cuda:0", vocab_size=8)
    engine = SimpleNamespace(loaded=loaded, runner=SimpleNamespace(graphs=graphs))
    llm = SimpleNamespace(engine=engine, self_test=None, generate=lambda *_: [SimpleNamespace(token_ids=[1, 2])])
    verdict, detail = command._written(command.DoctorConfig(), lambda config, num: llm)
    assert verdict is Verdict.WARNING
    assert detail == "m in bfloat16 on cuda:0, 2 tokens written, 2 CUDA graphs captured, but all run eagerly"


def command_of(source: str) -> tuple[str, ...]:
    return sys.executable, "-c", source


@pytest.mark.slow
def test_a_driver_that_does_not_answer_is_a_failure_and_nothing_behind_it_is_asked(monkeypatch, capsys):
    """The process that queries the driver hangs for good; loading the model would hang with it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hanging = command_of("import signal; signal.pause()")
    monkeypatch.setattr(command, "sees_gpu", partial(driver.sees_gpu, hanging, most_s=1.0))
    monkeypatch.setattr(command, "machine_parts", lambda: [Part("versions", 5, fine)])
    code, out = run(capsys)
    assert code == 1
    first, last = out.splitlines()
    assert first.endswith("it is [there]")
    assert "the driver does not answer within 1 s" in last


@pytest.mark.parametrize(
    ("source", "seen"),
    [("print(1)", True), ("print(1, flush=True); raise RuntimeError('a context')", True), ("print(0)", False)],
)
def test_a_gpu_is_seen_by_what_another_process_says(monkeypatch, source, seen):
    """A GPU is seen also if it then fails to work: the doctor's GPU part reports the failure."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert driver.sees_gpu(command_of(source)) is seen


@pytest.mark.slow
def test_the_question_itself_is_answered(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert driver.sees_gpu() is torch.cuda.is_available()


@pytest.mark.parametrize(("installed", "verdict"), [([device(0)], Verdict.FAILED), ([], Verdict.WARNING)])
def test_a_gpu_that_torch_does_not_see_is_a_failure(monkeypatch, installed, verdict):
    fake_nvml.install(monkeypatch, *installed)
    (part,) = gpu.gpu_parts(False)
    found, detail = part.ask()
    assert found is verdict
    assert detail.startswith("NVIDIA H100 stays unused: torch" if installed else "torch")


@pytest.mark.parametrize(
    ("carries", "verdict", "detail"),
    [
        ((True, True), Verdict.OK, "works between two processes, cuda:0 to cuda:0, cuda:0 to cuda:1"),
        (
            (True, False),
            Verdict.WARNING,
            "cuda:0 to cuda:0: works; cuda:0 to cuda:1: no peer access; --channel auto uses host memory there",
        ),
        ((False,), Verdict.WARNING, "cuda:0 to cuda:0: no peer access; --channel auto uses host memory there"),
    ],
)
def test_ipc_is_tried_on_the_same_gpu_and_on_the_next(monkeypatch, carries, verdict, detail):
    def try_channel(device, peer):
        if not carries[peer.index]:
            raise ChannelError("no peer access")

    monkeypatch.setattr(parts, "hooks", lambda name: (try_channel,))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(carries))
    names = [part.name for part in gpu.gpu_parts(True)]
    assert names == ["driver", "GPU", "GPU kernels", "CUDA IPC", "CUDA graphs"]
    part = gpu.gpu_parts(True)[names.index("CUDA IPC")]
    assert part.ask() == (verdict, detail)


def test_planted_code_is_named_and_not_run(tmp_path, trace, planted_run):  # noqa: F811 - fixtures
    got = planted_run("doctor", "--model", plant(VERIFIER, tmp_path / "model", trace), "--drafter", "none")
    assert got.code == 1
    assert "model_type 'planted'" in got.out
    assert "Traceback" not in got.out + got.err
