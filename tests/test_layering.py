"""The arrows between rooms: what each may import, and that nothing is imported in a circle.

A room is a folder below a layer, or a file that stands alone in a layer. Imports inside functions count, and so do
strings that name a module of ours, such as the path of a factory.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "runtime", "cluster", "deployments")
LIBRARIES_OF_KERNELS = {"torch", "triton"} | sys.stdlib_module_names
HTTP_LIBRARIES = {"fastapi", "starlette", "uvicorn", "httpx", "aiohttp", "requests"}
ROOMS_WITH_RAY = {"cluster.placement", "cluster.autoscaling"}

MAY_IMPORT = {
    "cluster.autoscaling": set(),
    "cluster.channels": {"runtime.free_memory", "runtime.protocol"},
    "cluster.child_process": set(),
    "cluster.cores": set(),
    "cluster.engine_speed": {"cluster.routing"},
    "cluster.placement": set(),
    "cluster.prefix_index": {"runtime.kv"},
    "cluster.process_tree": {"cluster.channels"},
    "cluster.routing": set(),
    "deployments.api": {
        "deployments.fleet",
        "deployments.lora_options",
        "deployments.page",
        "deployments.parsing",
        "deployments.metrics",
        "deployments.request_context",
        "runtime.lora",
        "runtime.scheduling",
        "runtime.text_stream",
        "runtime.tokenizer",
    },
    "deployments.app": {
        "cluster.autoscaling",
        "cluster.placement",
        "deployments.api",
        "deployments.app_config",
        "deployments.fleet",
        "deployments.log",
        "deployments.parsing",
        "deployments.metrics",
        "deployments.replica",
        "runtime.tokenizer",
    },
    "deployments.cli": {
        "cluster.channels",
        "deployments.app_config",
        "deployments.launch",
        "deployments.log",
        "deployments.model_options",
        "deployments.replica",
        "deployments.start_up",
        "runtime.checks",
        "runtime.config",
        "runtime.drafters",
        "runtime.free_memory",
        "runtime.heads",
        "runtime.hub",
        "runtime.kv",
        "runtime.llm",
        "runtime.protocol",
        "runtime.recordings",
        "runtime.scheduling",
        "runtime.tensor_files",
        "runtime.tensor_parallel",
        "runtime.tensorrt",
        "runtime.text_stream",
        "runtime.tokenizer",
        "runtime.tokenizer_file",
        "runtime.training",
        "runtime.verifier",
    },
    "deployments.app_config": {
        "cluster.autoscaling",
        "cluster.placement",
        "deployments.lora_options",
        "deployments.model_options",
        "deployments.pool_options",
        "deployments.rank_options",
        "deployments.surface_options",
        "runtime.config",
        "runtime.hub",
    },
    "deployments.fleet": {
        "cluster.prefix_index",
        "cluster.routing",
        "runtime.kv",
        "runtime.lora",
        "runtime.scheduling",
    },
    "deployments.launch": {
        "cluster.channels",
        "cluster.placement",
        "cluster.process_tree",
        "deployments.app",
        "deployments.app_config",
        "deployments.replica",
        "deployments.start_up",
        "deployments.stop_signals",
    },
    "deployments.log": {"deployments.request_context"},
    "deployments.lora_options": {"deployments.model_options", "runtime.config", "runtime.lora"},
    "deployments.metrics": {"deployments.request_context", "runtime.histogram", "runtime.scheduling"},
    "deployments.model_options": {
        "runtime.config",
        "runtime.demo",
        "runtime.drafters",
        "runtime.hub",
        "runtime.tensor_files",
    },
    "deployments.page": {"deployments.fleet"},
    "deployments.parsing": {"runtime.grammar"},
    "deployments.pool_options": set(),
    "deployments.rank_options": {"deployments.model_options"},
    "deployments.replica": {
        "cluster.autoscaling",
        "cluster.channels",
        "cluster.child_process",
        "cluster.cores",
        "cluster.engine_speed",
        "cluster.placement",
        "cluster.prefix_index",
        "cluster.routing",
        "deployments.app_config",
        "deployments.fleet",
        "deployments.log",
        "deployments.metrics",
        "runtime.checks",
        "runtime.config",
        "runtime.drafters",
        "runtime.engine",
        "runtime.grammar",
        "runtime.heads",
        "runtime.kv",
        "runtime.lora",
        "runtime.pair",
        "runtime.protocol",
        "runtime.recordings",
        "runtime.scheduling",
        "runtime.tensor_parallel",
        "runtime.verifier",
    },
    "deployments.request_context": set(),
    "deployments.start_up": set(),
    "deployments.stop_signals": set(),
    "deployments.surface_options": {
        "deployments.api",
        "deployments.metrics",
        "deployments.model_options",
        "deployments.parsing",
    },
    "kernels.attention": {"kernels.tree"},
    "kernels.cpu": {"kernels.layer"},
    "kernels.kv": set(),
    "kernels.layer": {"kernels.kv"},
    "kernels.sampling": set(),
    "kernels.tree": {"kernels.sampling"},
    "runtime.checks": {
        "runtime.config",
        "runtime.disk_cache",
        "runtime.drafters",
        "runtime.engine",
        "runtime.heads",
        "runtime.scheduling",
        "runtime.tokenizer",
        "runtime.verifier",
    },
    "runtime.config": set(),
    "runtime.demo": set(),
    "runtime.disk_cache": set(),
    "runtime.drafters": {
        "kernels.attention",
        "kernels.cpu",
        "kernels.kv",
        "kernels.tree",
        "runtime.config",
        "runtime.demo",
        "runtime.graphs",
        "runtime.heads",
        "runtime.hub",
        "runtime.kv",
        "runtime.protocol",
        "runtime.speculation",
        "runtime.tensor_files",
        "runtime.verifier",
    },
    "runtime.engine": {
        "runtime.config",
        "runtime.disk_cache",
        "runtime.drafters",
        "runtime.grammar",
        "runtime.graphs",
        "runtime.histogram",
        "runtime.kv",
        "runtime.protocol",
        "runtime.scheduling",
        "runtime.speculation",
        "runtime.verifier",
    },
    "runtime.free_memory": set(),
    "runtime.grammar": {"runtime.scheduling", "runtime.tokenizer"},
    "runtime.graphs": set(),
    "runtime.heads": {
        "kernels.cpu",
        "kernels.layer",
        "runtime.hub",
        "runtime.kv",
        "runtime.tensor_files",
        "runtime.verifier",
    },
    "runtime.histogram": set(),
    "runtime.hub": {"runtime.tensor_files"},
    "runtime.lora": set(),
    "runtime.kv": {"kernels.kv", "runtime.config", "runtime.free_memory"},
    "runtime.llm": {
        "runtime.config",
        "runtime.drafters",
        "runtime.engine",
        "runtime.graphs",
        "runtime.heads",
        "runtime.hub",
        "runtime.pair",
        "runtime.protocol",
        "runtime.scheduling",
        "runtime.tensor_files",
        "runtime.verifier",
    },
    "runtime.pair": {
        "runtime.checks",
        "runtime.config",
        "runtime.drafters",
        "runtime.engine",
        "runtime.grammar",
        "runtime.heads",
        "runtime.tensor_parallel",
        "runtime.tensorrt",
        "runtime.tokenizer",
        "runtime.verifier",
    },
    "runtime.protocol": {"runtime.config"},
    "runtime.recordings": {
        "kernels.sampling",
        "runtime.demo",
        "runtime.heads",
        "runtime.hub",
        "runtime.protocol",
        "runtime.scheduling",
        "runtime.tokenizer",
        "runtime.verifier",
    },
    "runtime.scheduling": {"runtime.config", "runtime.kv", "runtime.lora"},
    "runtime.speculation": {"runtime.config"},
    "runtime.state": set(),
    "runtime.tensor_files": set(),
    "runtime.tensor_parallel": {"runtime.config", "runtime.kv", "runtime.verifier"},
    "runtime.tensorrt": {
        "kernels.attention",
        "kernels.kv",
        "kernels.tree",
        "runtime.checks",
        "runtime.config",
        "runtime.drafters",
        "runtime.graphs",
        "runtime.heads",
        "runtime.kv",
        "runtime.protocol",
        "runtime.tensor_files",
        "runtime.tokenizer",
        "runtime.verifier",
    },
    "runtime.text_stream": {"runtime.scheduling", "runtime.tokenizer"},
    "runtime.token_length": set(),
    "runtime.tokenizer": {"runtime.token_length"},
    "runtime.tokenizer_file": {"runtime.tensor_files"},
    "runtime.training": {
        "runtime.config",
        "runtime.drafters",
        "runtime.heads",
        "runtime.hub",
        "runtime.llm",
        "runtime.protocol",
        "runtime.recordings",
        "runtime.scheduling",
        "runtime.verifier",
    },
    "runtime.verifier": {
        "kernels.attention",
        "kernels.cpu",
        "kernels.kv",
        "kernels.layer",
        "kernels.sampling",
        "kernels.tree",
        "runtime.config",
        "runtime.disk_cache",
        "runtime.graphs",
        "runtime.kv",
        "runtime.lora",
        "runtime.protocol",
        "runtime.scheduling",
        "runtime.speculation",
        "runtime.state",
        "runtime.tensor_files",
    },
}
"""Room -> rooms it may import, below it all. The serving path imports neither training nor recordings; the one window
is `deployments.replica.live_recording`, which a setting opens."""

IMPORT_PATH = re.compile(r"wingbeat(\.\w+)+(:\w+)?")


def modules() -> dict[str, Path]:
    """Every file by its import name."""
    paths = (path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py")))
    return {"wingbeat." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def imported_names(path: Path) -> Iterator[str]:
    """Absolute names a file imports, anywhere in it, and names of ours that stand in its strings alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IMPORT_PATH.fullmatch(node.value):
            yield node.value.replace(":", ".")


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """The module that a name lies in; None for a package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def room_of(module: str) -> str:
    """`runtime.engine` for `wingbeat.runtime.engine.drafter_client`."""
    return ".".join(module.split(".")[1:3])


def arrows() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    known = modules()
    found = {module: {module_of(name, known) for name in imported_names(path)} for module, path in known.items()}
    return {module: targets - {None, module} for module, targets in found.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in graph.items()}
    for via in graph:
        for node in graph:
            if via in reach[node]:
                reach[node] |= reach[via]
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def test_each_room_imports_only_what_it_may():
    wrong = []
    for module, path in modules().items():
        room, layer = room_of(module), module.split(".")[1]
        libraries = {name.partition(".")[0] for name in imported_names(path)} - {"wingbeat"}
        if layer == "kernels":
            wrong += [f"{module} imports {library}" for library in sorted(libraries - LIBRARIES_OF_KERNELS)]
        if layer != "deployments":
            wrong += [f"{module} imports {library}" for library in sorted(libraries & HTTP_LIBRARIES)]
            wrong += [f"{module} imports ray"] if "ray" in libraries and room not in ROOMS_WITH_RAY else []
        wrong += [f"{module} imports {top}" for top in sorted(libraries & {"tests", "benchmarks", "examples", *LAYERS})]
    for module, targets in arrows().items():
        allowed = MAY_IMPORT[room_of(module)] | {room_of(module)}
        wrong += [f"{module} imports {target}" for target in sorted(targets) if room_of(target) not in allowed]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_imported_in_a_circle():
    by_file = arrows()
    by_room: dict[str, set[str]] = {room_of(module): set() for module in by_file}
    for module, targets in by_file.items():
        by_room[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    assert not circles(by_file)
    assert not circles(by_room)
