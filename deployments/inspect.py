"""`wingbeat inspect`: what a checkpoint folder holds, and how it drafts for a verifier."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from wingbeat.deployments.local import LocalConfig, OpenEngine
from wingbeat.deployments.model_options import UserError

if TYPE_CHECKING:
    from wingbeat.runtime.convention_choice import ConventionChoice
    from wingbeat.runtime.drafters.target import TargetDescription
    from wingbeat.runtime.inspection import Inspection
    from wingbeat.runtime.self_test import SelfTest

_AT_ONCE = 16
"""Sequences of the self-test's engine."""


class InspectConfig(BaseModel):
    """Options of `wingbeat inspect`, the folder apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Path | None = Field(
        None,
        description="Folder of the verifier to try the drafter with; a model's own, to try its prediction modules.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV when served; 'auto' is bfloat16 on GPUs, float32 on CPUs."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where models are loaded to be tried.")
    threads: int = Field(1, ge=1, description="Torch CPU threads.")

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ValueError(f"--model {self.model}: no config.json there; give a Hugging Face checkpoint's folder")
        return self


@dataclass(frozen=True)
class Report:
    """All that was found out."""

    inspection: "Inspection"
    verifier: Path | None = None
    drafter: str | None = None
    """Kind that was tried with the verifier."""
    choice: "ConventionChoice | None" = None
    self_test: "SelfTest | None" = None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        fields = self.inspection.as_dict()
        if self.verifier is None:
            return fields | {"verifier": None, "drafter": None, "measured_convention": None, "self_test": None}
        measured = None
        if self.choice is not None:
            measured = {"chosen": self.choice.best.convention._asdict(), **self.choice.as_dict()}
        return fields | {
            "verifier": str(self.verifier),
            "drafter": self.drafter,
            "measured_convention": measured,
            "self_test": None if self.self_test is None else self.self_test.as_dict(),
        }


def inspect_command(config: InspectConfig, folder: Path, as_json: bool, open_engine: OpenEngine) -> None:
    """Print what a folder holds.

    Raises:
        UserError: it is no checkpoint, is not supported, or does not fit the verifier.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json there; give a checkpoint's folder")
    # Importing torch and transformers takes seconds.
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        report = inspect_folder(config, folder, open_engine)
    except (ValueError, OSError) as error:
        raise UserError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    from rich.console import Console

    from wingbeat.deployments.inspect_tables import tables

    console = Console()
    for table in tables(report):
        console.print(table)


def inspect_folder(config: InspectConfig, folder: Path, open_engine: OpenEngine) -> Report:
    """Read the folder, and try it with the verifier where one is given.

    Raises:
        ValueError, OSError, UserError: as `inspect_command`.
    """
    import torch

    from wingbeat.runtime.config import resolve_dtype
    from wingbeat.runtime.drafters.checkpoint import is_head_folder
    from wingbeat.runtime.drafters.target import TargetDescription
    from wingbeat.runtime.inspection import inspect_head, inspect_model

    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = "cuda" if is_cuda else "cpu"
    dtype = getattr(torch, resolve_dtype(config.dtype, device))
    target = None if config.model is None else TargetDescription.from_checkpoint(config.model)
    if is_head_folder(folder):
        inspection = inspect_head(folder, target, dtype)
    else:
        inspection = inspect_model(folder, dtype, torch.device(device))
    return Report(inspection) if target is None else _try(config, folder, inspection, target, open_engine)


def _try(
    config: InspectConfig, folder: Path, inspection: "Inspection", target: "TargetDescription", open_engine: OpenEngine
) -> Report:
    """Run the folder as a drafter, whether it suits or not."""
    drafter = str(folder)
    if folder.resolve() == target.path.resolve():
        if inspection.mtp is None:
            raise UserError(f"--model {target.path}: the model has no prediction modules to try; give another drafter")
        drafter = "mtp"
    local = LocalConfig(
        model=target.path,
        drafter=drafter,
        allow_bad_drafter=True,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        adaptive=False,
    )
    llm = open_engine(local, _AT_ONCE)
    kind = "mtp" if drafter == "mtp" else "eagle" if inspection.kind == "eagle" else "draft_model"
    return Report(inspection, target.path, kind, llm.convention_choice, llm.self_test)
