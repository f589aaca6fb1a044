"""Text of the Dockerfile: files that it names exist. `tests/e2e/test_image_built.py` runs it."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from fastapi import FastAPI
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import dockerfile
from tests.native import COMPILERS
from tests.optional import belongs_to_deleted
from wingbeat.deployments.api.endpoints.server_routes import add_server_routes
from wingbeat.deployments.cli.main import _app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def steps() -> list[dockerfile.Step]:
    return dockerfile.steps()


def arguments(steps: list[dockerfile.Step], name: str) -> list[str]:
    return [rest for step, rest in steps if step == name]


def test_docker_sends_what_the_wheel_is_built_of_and_nothing_else():
    first = next(line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#"))
    sent = {path for path in dockerfile.sent() if not belongs_to_deleted(path)}
    assert first == "*"
    assert all((ROOT / path).exists() for path in sent)
    links = [path for path in (ROOT / "src" / "wingbeat").iterdir() if path.is_symlink()]
    folders = {str(link.resolve().relative_to(ROOT)) for link in links} | {"src/wingbeat"}
    files = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert sent == folders | files | {"constraints/cpu.txt"}


def test_files_copied_into_the_image_are_sent(steps):
    sources = [rest.split()[0] for rest in arguments(steps, "COPY") if not rest.startswith("--from")]
    assert sources == [".", "constraints/cpu.txt"]
    assert sources[1] in dockerfile.sent()


def test_the_image_does_not_run_as_root_and_kubernetes_can_tell(steps):
    (user,) = arguments(steps, "USER")
    assert int(user) > 0
    names = [name for name, _ in steps]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")


def test_the_command_of_the_image_is_one_that_the_command_line_takes(steps):
    def words(name: str) -> list[str]:
        return re.findall(r'"([^"]+)"', arguments(steps, name)[-1])

    assert words("ENTRYPOINT")[0] in PROJECT["project"]["scripts"]
    command, *options = words("CMD")
    known = typer.main.get_command(_app()).commands[command].params
    flags = {flag for parameter in known for flag in parameter.opts}
    assert set(options[::2]) <= flags
    assert dict(zip(options[::2], options[1::2], strict=True)) == {"--host": "0.0.0.0", "--port": "8000"}
    assert arguments(steps, "EXPOSE") == ["8000"]


def test_the_health_check_asks_a_path_that_the_router_has_by_a_program_that_is_installed(steps):
    (check,) = arguments(steps, "HEALTHCHECK")
    words = re.findall(r'"([^"]+)"', check)
    app = FastAPI()
    add_server_routes(app, None)
    assert "http://127.0.0.1:8000/health" in words
    assert "/health" in {route.path for route in app.routes}
    installed = " ".join(arguments(steps, "RUN")).partition("install")[2]
    assert words[0] in shlex.split(installed.partition("&&")[0])


def test_the_cpu_kernels_and_triton_find_a_compiler(steps):
    installed = shlex.split(arguments(steps, "RUN")[1].partition("install")[2].partition("&&")[0])
    assert set(installed) & set(COMPILERS)


def test_ray_in_the_image_is_set_as_wingbeat_sets_its_own(steps):
    from wingbeat.deployments.launch import RAY_ENV

    (environ,) = arguments(steps, "ENV")
    assert dict(word.split("=", 1) for word in shlex.split(environ)).items() >= RAY_ENV.items()


def test_versions_in_the_image_are_ones_that_the_package_takes(steps):
    given = dict(rest.split("=", 1) for rest in arguments(steps, "ARG") if "=" in rest)
    needed = {Requirement(line).name: Requirement(line).specifier for line in PROJECT["project"]["dependencies"]}
    assert given["RAY_VERSION"] in needed["ray"]
    assert given["PYTHON_VERSION"] in SpecifierSet(PROJECT["project"]["requires-python"])
    assert given["VARIANT"] == "cpu"


@pytest.mark.parametrize(
    ("variant", "installs"),
    [
        ("cpu", "--extra-index-url INDEX --constraint /tmp/build/cpu.txt ray[serve]==2 /tmp/build/wheels/*.whl"),
        ("cuda", "ray[serve]==2 /tmp/build/wheels/*.whl"),
        ("rocm", None),
    ],
)
def test_the_variant_decides_which_torch_is_installed(steps, tmp_path: Path, variant: str, installs: str | None):
    (command,) = [rest for rest in arguments(steps, "RUN") if "pip install" in rest]
    for name in ("pip", "rm"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    environ = {"PATH": str(tmp_path), "VARIANT": variant, "RAY_VERSION": "2", "TORCH_CPU_INDEX": "INDEX"}
    done = subprocess.run(["/bin/sh", "-c", command], env=environ, capture_output=True, text=True, check=False)
    if installs is None:
        assert done.returncode == 1
        assert "VARIANT is rocm: must be cpu or cuda" in done.stderr
        assert not done.stdout
    else:
        assert done.stdout == f"pip install --no-cache-dir {installs}\nrm -rf /tmp/build\n"


def test_one_volume_holds_the_compiled_kernels_too():
    lines = dict(re.findall(r"(WINGBEAT_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", (ROOT / "Dockerfile").read_text()))
    assert lines["TRITON_CACHE_DIR"] == lines["WINGBEAT_CACHE_DIR"] + "/triton"
