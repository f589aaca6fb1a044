"""The package `wingbeat`: what a program imports first. Importing it takes neither torch nor Ray.

import wingbeat

app = wingbeat.build({"model": "MODEL", "drafter": "DRAFTER"})    # for serve.run, `serve run` and `serve build`
llm = wingbeat.LLM("MODEL", "DRAFTER")                            # in this process, without Ray
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.deployments.app import build
    from wingbeat.deployments.local_llm import LLM

    __version__: str

__all__ = ["LLM", "__version__", "build"]

_LAZY = {"build": "wingbeat.deployments.app", "LLM": "wingbeat.deployments.local_llm"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("wingbeat")
    if name not in _LAZY:
        raise AttributeError(f"module 'wingbeat' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
