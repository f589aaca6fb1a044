"""Public names of `wingbeat`, imported on first use: importing the package loads neither torch nor Ray.

import wingbeat

app = wingbeat.build({"model": "MODEL", "drafter": "DRAFTER"})    # for serve.run, `serve run` and `serve build`
llm = wingbeat.LLM("MODEL", "DRAFTER")                            # in this process, without Ray
llm.generate("Once upon a time", max_tokens=8)[0].text
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.deployments.app import build
    from wingbeat.deployments.offline.llm import LLM
    from wingbeat.deployments.offline.sampling import SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__", "build"]

_LAZY = {
    "build": "wingbeat.deployments.app",
    "LLM": "wingbeat.deployments.offline.llm",
    "SamplingParams": "wingbeat.deployments.offline.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("wingbeat")
    if name not in _LAZY:
        raise AttributeError(f"module 'wingbeat' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
