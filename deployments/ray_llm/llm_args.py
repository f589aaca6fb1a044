"""Translates arguments of Ray Serve LLM's `build_openai_app` to settings, from objects, YAML files or YAML text."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from wingbeat.deployments.ray_llm.llm_config import ACCELERATOR, GPU_PART, INGRESS, LLM_CONFIG, NESTED
from wingbeat.deployments.several_models.settings import OF_ROUTER
from wingbeat.deployments.vllm_words.foreign_rows import Translated, shown, translate
from wingbeat.deployments.vllm_words.speculative_config import flat
from wingbeat.deployments.vllm_words.vllm_options import VLLM
from wingbeat.runtime.drafters.choice import parse_drafter

FIELDS = ("llm_configs", "ingress_deployment_config", "ingress_cls_config")
WITH_DRAFTER = 0.7
"""Fraction of a pair's GPU share that the verifier gets if the drafter has weights. The drafter gets the rest."""


class Said(NamedTuple):
    """Settings that replace the arguments of `build_openai_app`."""

    settings: dict[str, Any]
    accelerator_types: list[str | None]
    """For each model, Ray's accelerator type for its pairs; None if any GPU is suitable."""
    notes: list[str]
    """A message for each field that is ignored."""


def read_args(args: Any, own: Collection[str]) -> Said:
    """Reads the arguments of an application with one or several models.

    Args:
        args: an object with `llm_configs`, the path of a YAML file, or YAML text.
        own: names of Wingbeat's settings, which may be given among `engine_kwargs`.

    Raises:
        ValueError: a field is unknown, not supported, or contradicts another field; the message is one line that names
            the field.
    """
    fields = _object(args, "args")
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"{name} is unknown: the fields are {', '.join(FIELDS)}")
    if fields.get("ingress_cls_config"):
        raise ValueError("ingress_cls_config is not supported: the router is Wingbeat's own; leave it out")
    configs = fields.get("llm_configs")
    if not isinstance(configs, list) or not configs:
        raise ValueError("llm_configs must be a list with at least one model")
    ingress = fields.get("ingress_deployment_config") or {}
    routers = translate(ingress, INGRESS, lambda name: f"ingress_deployment_config.{name}", ())
    places = [f"llm_configs[{index}]" for index in range(len(configs))]
    found = [_read_config(_object(one, place), place, own) for one, place in zip(configs, places, strict=True)]
    if len(found) == 1:
        return _placed(_joined(found[0], routers))
    for one in found:
        routers = _joined(
            routers, Translated({name: one.settings.pop(name) for name in OF_ROUTER if name in one.settings}, [])
        )
    models = list(map(_placed, found))
    return Said(
        routers.settings | {"models": [one.settings for one in models]},
        [one.accelerator_types[0] for one in models],
        [*(note for one in models for note in one.notes), *routers.notes],
    )


def _read_config(fields: Mapping[str, Any], place: str, own: Collection[str]) -> Translated:
    values = _flat_fields(fields)
    if not (fields.get("model_loading_config") or {}).get("model_id"):
        raise ValueError(f"{place}.model_loading_config.model_id must be given")
    said = translate(values, LLM_CONFIG, lambda name: f"{place}.{name}", ())
    options = flat(_object(fields.get("engine_kwargs") or {}, "engine_kwargs"))
    engine = translate(options, VLLM, lambda name: f"engine_kwargs.{name}", own, beside=said.settings)
    return _joined(said, engine)


def _flat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields; fields of nested objects are named `object.field`."""
    found = dict(fields)
    for name in NESTED:
        inner = found.pop(name, None)
        if inner is None:
            continue
        for field, value in _object(inner, name).items():
            found[f"{name}.{field}"] = value
    return found


def _joined(one: Translated, other: Translated) -> Translated:
    for name in one.settings.keys() & other.settings.keys():
        if one.settings[name] != other.settings[name]:
            values = f"{shown(one.settings[name])} and {shown(other.settings[name])}"
            raise ValueError(f"{name} is given twice, as {values}: give one of them")
    return Translated(one.settings | other.settings, [*one.notes, *other.notes])


def _placed(said: Translated) -> Said:
    """Divides a pair's GPU share between the verifier and a drafter with weights, if the arguments request a share
    below one GPU.
    """
    settings = dict(said.settings)
    accelerator, part = settings.pop(ACCELERATOR, None), settings.pop(GPU_PART, None)
    if part is not None:
        drafter = parse_drafter(settings.get("drafter", "auto"), Path(settings["model"]))
        own = round(WITH_DRAFTER * part, 4) if drafter.has_weights else part
        shares = {"num_gpus_per_verifier": own, "num_gpus_per_drafter": round(part - own, 4)}
        settings = {**shares, **settings}
    return Said(settings, [accelerator], said.notes)


def _object(value: Any, place: str) -> Mapping[str, Any]:
    """Returns an object that is given as a mapping, a pydantic model (Ray's `LLMConfig`), a YAML file or YAML text."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, str):
        text = Path(value).read_text(encoding="utf-8") if _is_file(value) else value
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{place} is not valid YAML: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is {shown(value)}: must be an object, an existing YAML file, or YAML text")
    return value


def _is_file(text: str) -> bool:
    return "\n" not in text and len(text) < 4096 and Path(text).is_file()
