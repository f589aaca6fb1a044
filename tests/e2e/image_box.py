"""The Dockerfile's instructions carried out one after the other without a builder, and the image's command started.

    unshare --mount --pid --fork --kill-child --mount-proc python -m tests.e2e.image_box FOLDER

Each stage is an overlay on a root that is there, this machine's where WINGBEAT_IMAGE_ROOT names no other one, with this
Python in the place of the base image's. Prints a line of JSON at last.
"""

import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.processes import exists
from tests.dockerfile import ROOT, sent, steps, words_of

LOWER = os.environ.get("WINGBEAT_IMAGE_ROOT", "/")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED_ON = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "SSL_CERT_FILE")
"""Beginnings of variables that say how packages are to be had from here."""
FIRST_USER = 1000
START = "--start"
START_S, END_S = 300.0, 90.0
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


@dataclass
class Stage:
    """A root, and what instructions have said so far."""

    root: Path
    arguments: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    said: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """A program in this root, as this user, in this folder."""
        inside = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        return ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "/bin/sh", "-c", inside]

    def environment(self) -> dict[str, str]:
        """Environment of the image's programs."""
        home = "/root" if self.user == "0" else self.folder
        return {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", **self.env}

    def run(self, line: str) -> None:
        """RUN."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        env = self.environment() | passed | self.arguments | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(self.command("/bin/sh", "-c", line), env=env, check=True, stdout=sys.stderr)

    def copy(self, rest: str, stages: dict[str, "Stage"]) -> None:
        """COPY of one source."""
        *options, source, target = rest.split()
        there = self.root / self.folder.lstrip("/") / target if target == "." else self.root / target.lstrip("/")
        for option in options:
            origin = stages[option.removeprefix("--from=")].root / source.lstrip("/")
            shutil.copytree(origin, there, dirs_exist_ok=True)
        if not options:
            for path in sent() if source == "." else [source]:
                _copy(ROOT / path, there / path if source == "." else there)


def build(folder: Path, given: dict[str, str]) -> Stage:
    """Carry out every instruction; the last stage.

    Raises:
        subprocess.CalledProcessError: an instruction fails.
        AssertionError: there is one that is not known here.
    """
    base = _base(folder / "base")
    stages: dict[str, Stage] = {}
    everywhere: dict[str, str] = {}
    stage: Stage | None = None
    for name, rest in steps():
        print(f"{name} {rest}", file=sys.stderr, flush=True)
        match name:
            case "ARG":
                key, _, value = rest.partition("=")
                (everywhere if stage is None else stage.arguments)[key] = given.get(key, value)
            case "FROM":
                assert rest.startswith("python:${PYTHON_VERSION}-slim-"), rest
                own = folder / f"stage{len(stages)}"
                stage = Stage(_overlay(own, f"{base}:{LOWER}"), {})
                stages[rest.partition(" AS ")[2] or "last"] = stage
            case "WORKDIR":
                stage.folder = rest
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                stage.copy(rest, stages)
            case "RUN":
                stage.run(rest)
            case "USER":
                stage.user = rest
            case "ENV":
                stage.env |= dict(word.split("=", 1) for word in shlex.split(rest))
            case _:
                assert name in ("EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"), name
                stage.said[name] = rest
    return stage


def start(stage: Stage) -> dict[str, Any]:
    """Start the image's command in a network of its own, wait until the health check is content, ask, and stop it."""
    _loopback_up()
    words = [*words_of(stage.said["ENTRYPOINT"]), *words_of(stage.said["CMD"])]
    began = time.monotonic()
    process = subprocess.Popen(stage.command(*words), env=stage.environment(), stdout=sys.stderr)
    health = stage.command(*words_of(stage.said["HEALTHCHECK"]))
    while subprocess.run(health, env=stage.environment(), check=False, stderr=subprocess.DEVNULL).returncode:
        assert process.poll() is None, f"it has ended with {process.returncode}"
        assert time.monotonic() < began + START_S, "it does not get healthy"
        time.sleep(1.0)
    healthy_s = time.monotonic() - began
    port = stage.said["EXPOSE"]
    body = json.dumps({"prompt": "def main():\n    ", "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    user = os.stat(f"/proc/{process.pid}").st_uid
    process.send_signal(signal.Signals[stage.said["STOPSIGNAL"]])
    exit_code = process.wait(END_S)
    own = [path for path in Path("/proc").glob("[0-9]*") if path.exists() and path.stat().st_uid == user]
    return {
        "text": told["choices"][0]["text"],
        "user": user,
        "healthy_s": round(healthy_s, 1),
        "exit_code": exit_code,
        "left": [path.name for path in own if exists(int(path.name))],
    }


def _overlay(folder: Path, lower: str) -> Path:
    for name in ("upper", "work", "root"):
        (folder / name).mkdir(parents=True)
    root = folder / "root"
    options = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/dev", root / "dev"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", root / "dev" / "shm"], check=True)
    return root


def _base(folder: Path) -> Path:
    """A stand-in for the base image, above the lower root: its Python and pip in /usr/local, and no user."""
    folder.mkdir(parents=True)
    # A lower layer may not lie in another one.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", folder], check=True)
    root = _overlay(folder, LOWER)
    for name in ("passwd", "group", "shadow"):
        file = root / "etc" / name
        lines = [line for line in file.read_text().splitlines() if name == "shadow" or _is_systems(line)]
        users = {line.split(":")[0] for line in (root / "etc" / "passwd").read_text().splitlines()}
        file.write_text("".join(f"{line}\n" for line in lines if name != "shadow" or line.split(":")[0] in users))
    prefix, local = Path(sys.base_prefix), root / "usr" / "local"
    version = f"python3.{sys.version_info.minor}"
    for part in (local / "lib" / version, local / "bin"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    shutil.copy2(prefix / "bin" / version, local / "bin")
    for name in ("python3", "python"):
        (local / "bin" / name).symlink_to(version)
    leave = shutil.ignore_patterns("site-packages", "test", "__pycache__")
    shutil.copytree(prefix / "lib" / version, local / "lib" / version, dirs_exist_ok=True, ignore=leave)
    shutil.copytree(prefix / "include" / version, local / "include" / version, dirs_exist_ok=True)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(library, local / "lib")
    base = Stage(root, {})
    base.run("ldconfig && python -m ensurepip --default-pip")
    return folder / "upper"


def _is_systems(line: str) -> bool:
    return not FIRST_USER <= int(line.split(":")[2]) < 60000


def _copy(source: Path, there: Path) -> None:
    there.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, there, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    else:
        shutil.copy2(source, there)


def _loopback_up() -> None:
    with socket.socket() as any_socket:
        flags = struct.unpack("16xh6x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16s8x", b"lo")))[0]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh6x", b"lo", flags | IFF_UP))


def main() -> None:
    """Build; then, as building needs this network and starting one of its own, start in another process."""
    if sys.argv[1] == START:
        told = json.loads(sys.argv[2])
        print(json.dumps(start(Stage(**told | {"root": Path(told["root"])}))), flush=True)
        return
    stage = build(Path(sys.argv[1]), dict(os.environ))
    told = json.dumps(vars(stage) | {"root": str(stage.root)})
    subprocess.run(["unshare", "--net", sys.executable, "-m", "tests.e2e.image_box", START, told], check=True)


if __name__ == "__main__":
    main()
