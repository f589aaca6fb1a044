"""First steps of a new user, with the standard library and an installed wheel alone: `python exercise.py [STEP ...]`.

The script runs in environments with other versions than the tests' own, without extras and without pytest.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
PROMPT = "class Stack:\n    def __init__(self):\n        "
READY_S, END_S = 300.0, 90.0
TRITON_ROOMS = ("alike", "experts", "latent_attention", "packed", "state")
EXTRAS = {
    "deployments.media": "PIL",
    "deployments.media.audio": "soundfile",
    "runtime.tensorrt": "onnx",
    **dict.fromkeys(
        ("kernels.gpu.", "kernels.launching", *(f"kernels.{room}.triton" for room in TRITON_ROOMS)), "triton"
    ),
    "kernels.lora.adapters_triton": "triton",
}
"""Modules that need a package as soon as they are imported: one of an extra, which whoever imports them says in words,
or Triton, which torch's builds for GPUs bring.
"""


class Home:
    """A folder of one user, and the environment of the commands that they call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "WINGBEAT_CACHE_DIR") if name in os.environ}
        self.env = kept | {
            "HOME": str(folder),
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "RAY_TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
        }

    def make_cache(self) -> None:
        """The demo pair as org/model and org/head, as huggingface_hub would have fetched it."""
        from wingbeat.runtime.demo import demo_pair

        for name, source in (("model", demo_pair().verifier), ("head", demo_pair().drafter)):
            repository = self.folder / "hf" / "hub" / f"models--org--{name}"
            for part, text in (("refs/main", "c" * 40), (f"snapshots/{'c' * 40}/.keep", "")):
                (repository / part).parent.mkdir(parents=True, exist_ok=True)
                (repository / part).write_text(text)
            for file in source.iterdir():
                (repository / "snapshots" / ("c" * 40) / file.name).symlink_to(file)

    def make_adapter(self) -> Path:
        """A LoRA adapter of the demo's model, of random numbers."""
        import torch
        from safetensors.torch import save_file

        from wingbeat.runtime.demo import demo_pair

        folder, rank = self.folder / "adapter", 4
        folder.mkdir()
        config = json.loads((demo_pair().verifier / "config.json").read_text())
        hidden = config["hidden_size"]
        torch.manual_seed(0)
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
        rows = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            tensors[name.format(layer, "A")] = torch.randn(rank, hidden) * 0.3
            tensors[name.format(layer, "B")] = torch.randn(rows, rank) * 0.3
        save_file(tensors, folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return folder

    def command(self, *words: str, code: int = 0) -> str:
        """Output of a command, of both streams for a refusal; raises on another exit code or a traceback."""
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{words} ends by {done.returncode}:\n{said}"
        assert "Traceback" not in said, f"{words}:\n{said}"
        # Warnings, such as of a machine that is busy, are no part of an answer.
        return said if code else done.stdout


def imports(home: Home) -> None:
    """Every module of the wheel, or a word for the extra that it needs."""
    import wingbeat

    top = Path(wingbeat.__file__).parent
    files = [file.relative_to(top.parent).with_suffix("").parts for file in sorted(top.rglob("*.py"))]
    names = [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in files]
    assert len(names) > 200, names
    for name in names:
        missing = None
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name
        needed = [package for prefix, package in EXTRAS.items() if name.startswith(f"wingbeat.{prefix}")]
        assert missing in (None, *needed), f"{name} needs {missing}"


def package(home: Home) -> None:
    """`import wingbeat` is fast, and has what its docstring says."""
    import wingbeat

    assert not {"torch", "ray", "transformers"} & set(sys.modules)
    assert Path(wingbeat.__file__).parent == Path(wingbeat.__path__[0]), list(wingbeat.__path__)
    assert re.fullmatch(r"[\d.]+", wingbeat.__version__)
    assert type(wingbeat.build({"drafter": "none"})).__name__ == "Application"
    problem = ""
    try:
        wingbeat.build({"modle": "x"})
    except ValueError as error:
        problem = str(error)
    assert problem == "there is no setting modle: did you mean model?", problem


def hub(home: Home) -> None:
    """Names of the hub, from the cache: what a start checks of them, and a text."""
    home.make_cache()
    os.environ |= home.env
    said = json.loads(
        home.command("wingbeat", "generate", "--model", "org/model", "--drafter", "org/head", "--json", PROMPT)
    )
    assert said["text"].strip(), said
    absent = home.command("wingbeat", "serve", "org/absent", code=2)
    assert "org/absent of the Hugging Face hub is not in the cache" in absent, absent


def local(home: Home) -> None:
    """The commands that run in one process."""
    assert home.command("wingbeat", "--version").startswith("wingbeat ")
    assert "eagle" in home.command("wingbeat", "inspect", str(_demo("drafter"))).lower()
    assert "llama" in home.command("wingbeat", "inspect", str(_demo("verifier"))).lower()


def missing_extras(home: Home) -> None:
    """Errors of features without their extra name the extra."""
    engines = home.command("wingbeat", "build-engine", "--out", "engines", "--onnx-only", code=2)
    assert "wingbeat[onnx]" in engines, engines
    spans = home.command("wingbeat", "serve", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces", code=2)
    assert "wingbeat[otel]" in spans, spans
    packed = home.folder / "packed"
    packed.mkdir()
    for file in _demo("verifier").iterdir():
        (packed / file.name).write_bytes(file.read_bytes())
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (packed / "config.json").write_text(json.dumps(config))
    quantised = home.command("wingbeat", "serve", str(packed), "none", code=2)
    assert "wingbeat[quantised]" in quantised, quantised


def served(home: Home) -> None:
    """A server of names of the hub with an adapter: texts, structured answers, an orderly end."""
    home.make_cache()
    port = _free_port()
    words = ["org/model", "org/head", "--lora-modules", f"tuned={home.make_adapter()}", "--port", str(port)]
    with _running(home, ["wingbeat", "serve", *words], port) as process:
        answer = _post(port, "completions", prompt=PROMPT, max_tokens=32)
        assert answer["metrics"]["speculative_decoding"]["num_drafts"] > 0, answer
        plain = _post(port, "completions", prompt=PROMPT, max_tokens=32, speculation={"enabled": False})
        assert _text(plain) == _text(answer), (plain, answer)
        tuned = _post(port, "completions", prompt=PROMPT, max_tokens=32, model="tuned")
        assert _text(tuned) != _text(answer), tuned
        number = _post(port, "completions", prompt="version = ", structured_outputs={"regex": "[0-9]{2}[.][0-9]"})
        assert re.fullmatch(r"\d\d\.\d", _text(number)), number
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False  # others could be longer than an answer
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        chat = _post(port, "chat/completions", messages=[{"role": "user", "content": "a?"}], response_format=form)
        assert isinstance(json.loads(chat["choices"][0]["message"]["content"])["a"], bool), chat
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, process.returncode


def by_serve(home: Home) -> None:
    """Ray's own commands: a file by `serve build`, and `serve run` of it."""
    refused = home.command("serve", "run", "wingbeat.deployments.app:build", "model=/no/such/folder", code=1)
    assert "/no/such/folder" in refused, refused
    home.command("serve", "build", "wingbeat.deployments.app:app", "-o", "app.yaml")
    file, port = home.folder / "app.yaml", _free_port()
    text = file.read_text()
    assert "port: 8000" in text, text
    assert "host: 0.0.0.0" in text, text
    file.write_text(text.replace("port: 8000", f"port: {port}").replace("host: 0.0.0.0", "host: 127.0.0.1"))
    with _running(home, ["serve", "run", "app.yaml"], port) as process:
        assert _text(_post(port, "completions", prompt=PROMPT, max_tokens=8))
        process.send_signal(signal.SIGINT)
        process.wait(END_S)


STEPS: dict[str, Callable[[Home], None]] = {
    step.__name__: step for step in (package, imports, local, missing_extras, hub, served, by_serve)
}
"""In the order of a whole run; each in a process of its own, so that none finds what another has imported."""


@contextmanager
def _running(home: Home, words: list[str], port: int) -> Iterator["subprocess.Popen[str]"]:
    """A server in a session of its own, from when it is healthy on; what it prints is shown where something fails."""
    log = home.folder / "server.log"
    # A shell without job control has its background jobs ignore SIGINT, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            cwd=home.folder,
            env=home.env,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        _wait_ready(process, port)
        yield process
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            process.kill()
        _end_session(process.pid)


def _wait_ready(process: "subprocess.Popen[str]", port: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:
            assert process.poll() is None, f"it has ended by {process.returncode}"
            assert time.monotonic() < deadline, f"it is not ready after {READY_S:g} s"
            time.sleep(0.5)


def _end_session(leader: int) -> None:
    """Processes that a server has left behind; Ray's are of its session, each in a group of its own."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            os.kill(int(entry.parent.name), signal.SIGKILL)


def _post(port: int, path: str, **body: Any) -> dict[str, Any]:
    body = {"temperature": 0, **body}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path} {body}: {error.code} {error.read().decode()}") from error


def _text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def _demo(part: str) -> Path:
    from wingbeat.runtime.demo import demo_pair

    return getattr(demo_pair(), part)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(names: list[str]) -> int:
    """Run steps; one by its name in this process, several each in its own."""
    if len(names) == 1:
        with tempfile.TemporaryDirectory(prefix="wb", ignore_cleanup_errors=True) as folder:
            started = time.monotonic()
            STEPS[names[0]](Home(Path(folder)))
            print(f"{names[0]}: {time.monotonic() - started:.1f} s", flush=True)
        return 0
    command = [sys.executable, "-P", __file__]
    failed = [name for name in names or STEPS if subprocess.run([*command, name], check=False).returncode]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names or STEPS)} steps passed", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
