"""Take optional features out of a copy of the tree, and look whether the rest still stands.

    python -m tests.without NAME [NAME ..] | --each | --all | --list  [--light]

The files that `tests.optional` gives for the features are deleted, and those of the features that need them. Then, a
line for each step:

- links: every import of ours that is left, in strings too, leads to a file that is there;
- imports, lint, collected: every module is imported, ruff and import-linter find nothing, every test is collected;
- tests, served: what `make test` runs passes, and a completion of a started server, plain and speculating, has the text
  of the whole tree's.

With `--light` the last two are left out, and but for all features at once the three before them.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.optional import FEATURES, belongs_to_deleted, without
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
OURS = (*LAYERS, "tests", "benchmarks")
OURS_NAMES = (*(f"wingbeat.{layer}" for layer in LAYERS), "tests.")
IMPORT_PATH = re.compile(r"[\"'](wingbeat(?:\.\w+)+(?::\w+)?)[\"']")
"""A name of ours in a string, such as the path of a factory."""
READY_S, TESTS_S, ANSWER_S, STOP_S = 300, 3600, 60, 60
EXTRAS = ("tensorrt", "soundfile", "soxr", "matplotlib", "tensorboard")
"""Libraries that an environment need not have: modules that import one of them may fail for it."""
IMPORT_ALL = f"""
import importlib, sys
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {EXTRAS!r}:
            failed.append(f"{{name}}: {{error}}")
    except Exception as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
print(*failed, sep="\\n")
sys.exit(bool(failed))
"""


class Broken(Exception):
    """The rest of the repository is broken; the message names the reason."""


def main() -> None:
    """Run what the arguments ask for; exits with 1 where something is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*FEATURES, []])
    parser.add_argument("--each", action="store_true", help="one after the other")
    parser.add_argument("--all", action="store_true", help="all at once")
    parser.add_argument(
        "--list", action="store_true", help="features, and in how many other files of the source each is named"
    )
    parser.add_argument("--light", action="store_true")
    args = parser.parse_args()
    if args.list:
        for name in FEATURES:
            others = ", ".join(sorted(without({name}) - {name}))
            print(f"{name:18} {num_places(name):3} files beside its own{others and '; goes with it: '}{others}")
    runs = [{name} for name in FEATURES] if args.each else []
    runs += [set(args.names)] if args.names else []
    runs += [set(FEATURES)] if args.all else []
    broken = False
    for names in runs:
        with tempfile.TemporaryDirectory(prefix="wingbeat-without-") as folder:
            broken |= not stands(Path(folder) / "tree", without(names), light=args.light, whole=names == set(FEATURES))
    sys.exit(broken)


def stands(tree: Path, names: set[str], *, light: bool, whole: bool) -> bool:
    """Whether the tree without these features passes every step; prints a line for each."""
    title = "all" if whole else " ".join(sorted(names))
    steps: list[tuple[str, Callable[[Path], None]]] = [("links", lambda _tree: check_links(ROOT, files_of(names)))]
    if whole or not light:
        steps += [("imports", check_imports), ("lint", check_lint), ("collected", check_collected)]
    if not light:
        steps += [("tests", check_tests), ("served", check_served)]
    for step, check in steps:
        begun = time.monotonic()
        try:
            if step == "imports":
                copy(tree, files_of(names))
            check(tree)
        except (Broken, subprocess.TimeoutExpired) as error:
            print(f"without {title}: {step}: {error}", flush=True)
            return False
        print(f"without {title}: {step}: fine, {time.monotonic() - begun:.0f} s", flush=True)
    return True


def files_of(names: set[str], root: Path = ROOT) -> set[Path]:
    """Files of features, relative to the root.

    Raises:
        Broken: a path of the table names nothing.
    """
    files = set()
    for name in names:
        for glob in FEATURES[name].paths:
            paths = [path for top in root.glob(glob) for path in (top, *top.rglob("*"))]
            found = [path for path in paths if path.is_file() or path.is_symlink()]
            if not found and not belongs_to_deleted(glob):
                raise Broken(f"{name}: there is no {glob}")
            files |= {path.relative_to(root) for path in found}
    return files


def copy(tree: Path, gone: set[Path]) -> None:
    """The files of the working tree that git has, or would take, without some."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in map(Path, filter(None, listed.split("\0"))):
        source, target = ROOT / name, tree / name
        if name not in gone and (source.is_symlink() or source.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def check_links(root: Path, gone: set[Path]) -> None:
    """Raises Broken with the imports of ours that lead to nothing once some files are gone."""
    left = {path for path in sources(root) if path not in gone}
    there = {str(place) for path in left for place in (path, *path.parents)}
    loose = [
        f"{path} imports {name}"
        for name, importers in importers_of(root).items()
        if not is_there(name.split("."), there, root)
        for path in sorted(importers & left)
        if name.startswith(OURS_NAMES) or path.with_name(f"{name.partition('.')[0]}.py") in gone
    ]
    if loose:
        raise Broken("; ".join(loose))


@cache
def sources(root: Path) -> tuple[Path, ...]:
    """Our files of Python, relative to the root."""
    return tuple(path.relative_to(root) for room in OURS for path in sorted((root / room).rglob("*.py")))


@cache
def importers_of(root: Path) -> dict[str, set[Path]]:
    """Names of ours that are imported, each with the files that import it."""
    importers: dict[str, set[Path]] = {}
    for path in sources(root):
        for name in imports_of(root / path, root):
            if name.startswith(OURS_NAMES) or (root / path).with_name(f"{name.partition('.')[0]}.py").exists():
                importers.setdefault(name, set()).add(path)
    return importers


def is_there(parts: list[str], there: set[str], root: Path) -> bool:
    """Whether the parts of a name lead to a folder, to a file, or to what a file has in it."""
    parts = parts[parts[0] == "wingbeat" :]
    for place in range(len(parts), 0, -1):
        path = "/".join(parts[:place])
        if f"{path}.py" in there:
            return True
        if path in there:
            init = f"{path}/__init__.py"
            return place == len(parts) or (init in there and parts[place] in (root / init).read_text(encoding="utf-8"))
    return False


@cache
def imports_of(path: Path, root: Path) -> tuple[str, ...]:
    """Absolute names that a file imports anywhere in it, and names of ours that stand in its strings."""
    return tuple(_imports_of(path, path.relative_to(root).parent.parts))


def _imports_of(path: Path, package: tuple[str, ...]) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for node in _statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join(filter(None, (*above, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)
    yield from (found[1].replace(":", ".") for found in IMPORT_PATH.finditer(text))


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements, and those within them; expressions, most of a tree, are not walked."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, field, ()))


def check_imports(tree: Path) -> None:
    """Raises Broken where a module that is left cannot be imported."""
    modules = [
        "wingbeat." + ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")
        for layer in LAYERS
        for path in sorted((tree / layer).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    run(tree, "-c", IMPORT_ALL, *modules)


def check_lint(tree: Path) -> None:
    """Raises Broken with what ruff and import-linter find."""
    run(tree, "-m", "ruff", "check", "--quiet", *OURS)
    run(tree, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache", "--no-logo")


def check_collected(tree: Path) -> None:
    """Raises Broken where a test module that is left cannot be collected."""
    run(tree, "-m", "pytest", "--collect-only", "-qq", "--assert=plain", "-p", "no:cacheprovider", "tests")


def check_tests(tree: Path) -> None:
    """Raises Broken where a test of `make test` fails; what documents name is left out: they are of the whole tree."""
    prose = ("--ignore=tests/test_docs.py", "--ignore=tests/test_names_in_prose.py")
    tier = ("-m", "not (slow or soak or gpu)")
    run(tree, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", *tier, *prose, "tests")


def check_served(tree: Path) -> None:
    """Raises Broken where a server of the tree does not start, or writes another text than the whole tree's."""
    texts = {place: completions(place) for place in (ROOT, tree)}
    if texts[tree] != texts[ROOT]:
        raise Broken(f"{texts[tree]} in the place of {texts[ROOT]}")


def completions(tree: Path) -> list[str]:
    """Texts of the demo, decoded plainly and speculatively."""
    port = free_port()
    command = "from wingbeat.deployments.cli.main import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", command, "serve", "--port", str(port)],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + READY_S
        while not answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise Broken("the server does not start")
            time.sleep(0.5)
        return [completion(port, speculates) for speculates in (False, True)]
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            raise Broken("the server does not end") from None


def answers(port: int) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def completion(port: int, speculates: bool) -> str:
    """A greedy text; raises Broken where drafts were not as asked for."""
    fields = {"prompt": "def main():\n", "max_tokens": 32, "temperature": 0}
    body = json.dumps({**fields, "speculation": {"enabled": speculates, "force": speculates}}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        got = json.load(answer)
    if (got["metrics"]["speculative_decoding"]["num_drafts"] > 0) != speculates:
        raise Broken(f"drafts: {got['metrics']}")
    return got["choices"][0]["text"]


def run(tree: Path, *words: str) -> None:
    """Run this Python on the tree; raises Broken with the end of what it said where it fails."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    if done.returncode:
        raise Broken((done.stdout + done.stderr).strip()[-2000:])


def environment(tree: Path) -> dict[str, str]:
    """In which the tree is imported, and not what is installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}


def num_places(name: str) -> int:
    """Files of the source that name a module of the feature and stay when the feature is deleted."""
    own, gone = files_of({name}), files_of(without({name}))
    modules = {".".join(("wingbeat", *path.with_suffix("").parts)).removesuffix(".__init__") for path in own}
    files = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if path.relative_to(ROOT) not in gone)
    used = ({name for found in imports_of(path, ROOT) for name in (found, found.rpartition(".")[0])} for path in files)
    return sum(not modules.isdisjoint(names) for names in used)


if __name__ == "__main__":
    main()
