"""The first hour of a new user: README's commands in a fresh folder, names of the hub, wrong paths, ten agents."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.agent_bodies import AGENT_BODIES, AgentBody
from tests.e2e.readme_commands import ROOT, commands, readme_commands
from tests.optional import kept
from tests.ports import free_port
from wingbeat.runtime.demo import demo_pair

VENV = Path(sys.executable).parents[1]
READY_S, END_S, ANSWER_S = 300.0, 90.0, 120.0
AT_ONCE_S = 3.0
HEAVY = ("torch", "transformers", "ray")
NOT_RUN = {
    "make test": "it would run this test",
    ".venv/bin/wingbeat serve Qwen/Qwen3-8B Tengyunw/qwen3_8b_eagle3": "needs the hub and a GPU",
    ".venv/bin/serve run examples/serve/demo_cpu.yaml": "test_serve_deploy deploys the file",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of nobody, with a cache of the hub that holds the demo pair as org/model and org/head."""
    folder = tmp_path_factory.mktemp("home")
    for name, source in (("model", demo_pair().verifier), ("head", demo_pair().drafter)):
        repository = folder / "hf" / "hub" / f"models--org--{name}"
        for part in ("refs", f"snapshots/{'c' * 40}"):
            (repository / part).mkdir(parents=True)
        (repository / "refs" / "main").write_text("c" * 40)
        for file in source.iterdir():
            (repository / "snapshots" / ("c" * 40) / file.name).symlink_to(file)
    (folder / "models").mkdir()
    (folder / "weights.gguf").write_text("")
    return folder


def environment(home: Path) -> dict[str, str]:
    """Without what the tests' own environment says of Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # A proxy that reaches no replica, as on machines of companies.
    proxy = {"grpc_proxy": "http://127.0.0.1:9"}
    return kept | {"HF_HOME": str(home / "hf"), "RAY_TMPDIR": str(home), "PYTHONUNBUFFERED": "1"} | proxy


def test_every_command_of_the_readme_is_run_here():
    assert len(readme_commands()) >= 6
    assert not [command for command in readme_commands() if command not in NOT_RUN and not _is_run(command)]


def test_commands_are_found_with_their_bodies():
    text = '```\n$ curl -d \'{\n  "a": 1\n}\'\n{"answer": 2}\nmake serve      # says what\n```\n'
    assert commands(text) == ["curl -d '{\n  \"a\": 1\n}'", "make serve"]


def _is_run(command: str) -> bool:
    return command.startswith("curl ") or command in ("make serve", SERVE_PAIR, SERVE_RUN)


SERVE_PAIR = ".venv/bin/wingbeat serve MODEL DRAFTER"
PAIR = ("examples/demo_pair/verifier", "examples/demo_pair/drafter")
SERVE_RUN = ".venv/bin/serve run wingbeat.deployments.app:build model={} drafter={}".format(*PAIR)

WRONG_PATHS = {
    "model": (["serve", "/no/such/folder"], "there is no folder /no/such/folder"),
    "model below here": (["serve", "./models/llama"], "there is no folder models/llama"),
    "model or a name of the hub": (["serve", "models/llama"], "there is no folder models/llama here"),
    "model that is a file": (["serve", "weights.gguf"], "weights.gguf is damaged or not a GGUF file"),
    "model without config": (["serve", "models"], "folder models is empty"),
    "drafter": (["serve", "--drafter", "/no/such/head"], "there is no folder /no/such/head"),
    "drafter below here": (["serve", "--drafter", "./heads/one"], "there is no folder ./heads/one"),
    "adapter": (["serve", "--lora-modules", "a=/no/adapter"], "adapter 'a': there is no folder /no/adapter"),
    "generate": (["generate", "--model", "/no/such/folder", "x"], "there is no folder /no/such/folder"),
    "inspect": (["inspect", "/no/such/folder"], "there is no folder /no/such/folder"),
    "inspect with": (["inspect", "--model", "/no/such/folder", "models"], "there is no folder /no/such/folder"),
    "extract": (["extract", "--model=/no/such/folder", "--output", "x"], "there is no folder /no/such/folder"),
    "build-engine": (["build-engine", "--model", "./no/model", "--out", "x"], "there is no folder no/model"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", kept(WRONG_PATHS))
def test_a_wrong_path_is_one_line_before_anything_heavy_is_imported(case: str, home: Path):
    words, says = WRONG_PATHS[case]
    code = (
        "import sys\nfrom wingbeat.deployments.cli.main import main\n"
        f"try:\n    main({words!r})\nfinally:\n    print(*({set(HEAVY)!r} & set(sys.modules)))\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=home, env=environment(home), capture_output=True, text=True, check=False
    )
    seconds, said = time.monotonic() - started, done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert says in said[-1]
    assert [line for line in said if not line.startswith("There is no folder")] == said[-1:]
    assert done.stdout.split("\n")[-2] == "", f"imported: {done.stdout}"
    # Wide: what it takes on a machine that has nothing else to do is a third of a second.
    assert seconds < 10 * AT_ONCE_S


@pytest.mark.slow
def test_a_wrong_path_takes_less_than_three_seconds(home: Path):
    """The best of three, on a machine that may have other things to do."""
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        command = [str(VENV / "bin" / "wingbeat"), "serve", "/no/such/folder"]
        done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - started)
        assert done.returncode == 2
    assert min(seconds) < AT_ONCE_S


@pytest.mark.slow
@pytest.mark.parametrize("words", [["model=/no/such/folder"], ["modle=x"], ["drafter=/no/such/head"]], ids=str)
def test_serve_run_says_what_is_wrong_in_one_line(words: list[str], home: Path):
    command = [str(VENV / "bin" / "serve"), "run", "wingbeat.deployments.app:build", *words]
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert line.startswith("Error: ")
    assert words[0].partition("=")[0] in line


@contextmanager
def running(command: list[str], home: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server in a session of its own, healthy; all of it is gone behind the block."""
    log = home / f"server-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(home),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not _is_healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def model_of(port: int) -> str:
    """Name of the model that a server has."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return json.load(answer)["data"][0]["id"]


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[int]:
    """The port of what `make serve` starts in a fresh folder."""
    yield from made(home)


@pytest.fixture(scope="module")
def demo(home: Path) -> Iterator[int]:
    """The port of the demo pair."""
    yield from made(home, "MODEL=demo")


def made(home: Path, *words: str) -> Iterator[int]:
    """The port of `make serve` in a fresh folder, while it runs."""
    port = free_port()
    # Keep the installation: the rule for the stamp would install everything again.
    stamp, makefile = VENV / "serving", ROOT / "Makefile"
    command = ["make", "-f", str(makefile), "-o", str(stamp), f"VENV={VENV}", f"PORT={port}", "serve", *words]
    with running(command, home, port):
        yield port


README_CURLS = [command for command in readme_commands() if command.startswith("curl ")]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("command", README_CURLS, ids=lambda command: re.findall(r"127.0.0.1:8000(\S*)", command)[0])
def test_a_curl_of_the_readme_gets_what_it_says(command: str, served: int, home: Path):
    shell = shutil.which("bash")
    said = subprocess.run(
        [shell, "-c", command.replace("8000", str(served))], cwd=home, capture_output=True, text=True, check=True
    ).stdout
    if "/metrics" in command:
        assert 'wingbeat_engine_up{engine="' in said
        return
    answer = json.loads(said)
    if "/chat/" in command and model_of(served) == "wingbeat-demo":
        pytest.skip("the model cannot be fetched here")
    if "/chat/" in command:
        assert "Paris" in answer["choices"][0]["message"]["content"]
    else:
        assert answer["choices"][0]["text"]
    assert answer["metrics"]["speculative_decoding"]["num_drafts"] >= 0
    if "regex" in command:
        assert re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,2}\.[0-9]", answer["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("agent", AGENT_BODIES.values(), ids=AGENT_BODIES)
def test_an_agent_is_answered(agent: AgentBody, demo: int):
    path, body, headers = agent
    request = urllib.request.Request(
        f"http://127.0.0.1:{demo}{path}", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    assert status == 200, text
    if not body.get("stream"):
        assert "error" not in {name for name, value in json.loads(text).items() if value}
        return
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events
    assert not [event for event in events if event.get("error") or event.get("type") in ("error", "response.failed")]


LIBRARIES = (
    "torch",
    "transformers",
    "numpy",
    "json",
    "ray",
    "pydantic",
    "uvicorn",
    "llguidance",
    "safetensors",
    "site",
)


def planted(folder: Path) -> Path:
    """A copy of the demo's model with modules by the names of libraries, each of which leaves a trace where it runs."""
    shutil.copytree(demo_pair().verifier, folder, dirs_exist_ok=True)
    for name in LIBRARIES:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(7)\n")
    return folder


@pytest.mark.slow
@pytest.mark.ray
def test_a_checkpoint_that_is_the_working_directory_runs_no_code(tmp_path_factory: pytest.TempPathFactory):
    folder, port = planted(tmp_path_factory.mktemp("in")), free_port()  # A long path is none for Ray's sockets.
    with running([str(VENV / "bin" / "wingbeat"), "serve", ".", "--port", str(port)], folder, port):
        body = {"prompt": "x", "max_tokens": 4}
        body |= kept({"structured_outputs": {"regex": "[a-z]+"}})
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            assert json.load(answer)["choices"][0]["text"]
    assert not (folder / "ran").exists(), (folder / "ran").read_text()


@pytest.mark.slow
def test_a_command_in_a_checkpoint_runs_none_either(tmp_path: Path):
    folder = planted(tmp_path / "model")
    command = [str(VENV / "bin" / "wingbeat"), "serve", ".", "--max-model-len", "99999999"]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "max_model_len" in done.stderr.splitlines()[-1]
    assert not (folder / "ran").exists(), (folder / "ran").read_text()


def test_every_python_of_ours_is_kept_from_the_working_directory():
    """`sys.executable` stands where its command is made; a question by `-c` says `-P` itself."""
    found = {
        str(file.relative_to(ROOT)): text
        for room in ("kernels", "runtime", "cluster", "deployments")
        for file in (ROOT / room).rglob("*.py")
        if "sys.executable" in (text := file.read_text())
    }
    questions = {"deployments/doctor/driver.py"} & found.keys()
    watchdogs = {"deployments/ray_guard/watchdog.py"} & found.keys()
    assert set(found) == {"runtime/interpreter.py"} | watchdogs | questions
    assert all('(sys.executable, "-P", "-c"' in found[name] for name in questions)


@pytest.mark.slow
@pytest.mark.ray
def test_a_pair_of_the_hub_is_served_by_its_names(home: Path):
    port = free_port()
    words = SERVE_PAIR.replace("MODEL", "org/model").replace("DRAFTER", "org/head").split()[1:]
    with running([str(VENV / "bin" / "wingbeat"), *words, "--port", str(port)], home, port) as process:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=ANSWER_S) as answer:
            assert json.load(answer)["data"][0]["id"] == "org/model"
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


@pytest.mark.slow
@pytest.mark.ray
def test_serve_run_serves_a_pair_in_a_cluster_that_runs(ray_cluster: str, home: Path):
    """In a cluster that has Serve: the command alone would listen at port 8000, which may be somebody's."""
    import ray
    from ray import serve

    pair = demo_pair()
    words = SERVE_RUN.replace(PAIR[0], str(pair.verifier)).replace(PAIR[1], str(pair.drafter)).split()[1:]
    # As docs/operations.md has it: a cluster that asks for Ray's token asks these commands too.
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    try:
        command = [str(VENV / "bin" / "serve"), words[0], "--non-blocking", *words[1:]]
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        body = json.dumps({"prompt": "def add(", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{ray_cluster}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            assert json.load(answer)["choices"][0]["text"]
    finally:
        serve.delete("default")
