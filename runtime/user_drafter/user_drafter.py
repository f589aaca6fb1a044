"""Loads a user's drafter class from its import path; each kind of mistake has its own error message."""

import importlib
import inspect

import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription


class UserDrafterError(ValueError):
    """A user's drafter cannot be used; the message is one line that says what to change."""


def load_user_drafter(
    path: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    """Import the class `module.path.ClassName` and create a drafter by `ClassName(target, speculation, options)`.

    Raises:
        UserDrafterError: the path has no dot, the module or class does not exist, the class is not a `Drafter` or lacks
            a method, or the module or constructor raised.
    """
    found = find_class(path)
    try:
        drafter = found(target, speculation, options)
    except Exception as error:
        raise UserDrafterError(f"drafter {path}: its constructor raised {_said(error)}") from error
    if not isinstance(drafter.needs, DrafterNeeds):
        raise UserDrafterError(f"drafter {path}: its `needs` is {drafter.needs!r}, it must be a DrafterNeeds")
    if not isinstance(drafter.device, torch.device):
        raise UserDrafterError(f"drafter {path}: its `device` is {drafter.device!r}, it must be a torch.device")
    return drafter


def find_class(path: str) -> type[Drafter]:
    """Import a drafter's class; raises the errors of `load_user_drafter`."""
    module_name, dot, class_name = path.rpartition(".")
    if not (dot and module_name and class_name):
        raise UserDrafterError(f"drafter {path!r} names no module: write module.path.ClassName")
    found = getattr(_import(path, module_name), class_name, None)
    if found is None:
        raise UserDrafterError(f"drafter {path}: module {module_name} has no {class_name}")
    if not inspect.isclass(found):
        raise UserDrafterError(f"drafter {path} is not a class but a {type(found).__name__}")
    if not issubclass(found, Drafter):
        raise UserDrafterError(f"drafter {path} is not a subclass of wingbeat.runtime.drafters.base.Drafter")
    missing = sorted(found.__abstractmethods__)
    if missing:
        raise UserDrafterError(f"drafter {path} lacks the method{'s' * (len(missing) > 1)} {', '.join(missing)}")
    return found


def _import(path: str, module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserDrafterError(
                f"drafter {path}: there is no module {error.name}; is its folder on PYTHONPATH?"
            ) from error
        raise UserDrafterError(f"drafter {path}: importing {module_name} raised {_said(error)}") from error
    except Exception as error:
        raise UserDrafterError(f"drafter {path}: importing {module_name} raised {_said(error)}") from error


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
