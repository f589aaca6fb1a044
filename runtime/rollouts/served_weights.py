"""Weights of a served verifier, under their names in the checkpoint and in transformers' `named_parameters`.

A weight is written in place, in the layout that the layers read. Therefore no layer is recreated, no round is captured
again, and at most one matrix is in memory twice.
"""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD
from wingbeat.runtime.verifier.layers.linears import Packable, PackableLinear, dense_weight
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

if TYPE_CHECKING:
    from wingbeat.runtime.rollouts.current_rows import CurrentRows

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUM_NAMED = 3
_NOISE = 0.02
"""Standard deviation of the noise of `scramble`."""


class WeightsRefused(ValueError):
    """Weights do not fit, and nothing was written. The message is one line that names the tensor."""


class ServedWeights:
    """Weights of a loaded verifier, which can be written between two rounds.

    Raises:
        WeightsRefused: the weights are held in a form that cannot be overwritten.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model, self._shards = loaded.model, loaded.shards
        self._rows = cast("CurrentRows | None", loaded.parts.get("rows"))
        model = loaded.model
        self._ends = {model.get_input_embeddings(): EMBEDDING}
        if not model.config.get_text_config().tie_word_embeddings:
            self._ends[model.get_output_embeddings()] = LM_HEAD
        if self._shards is not None and self._shards.problem is not None:
            raise WeightsRefused(self._shards.problem)
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name in module._parameters:
                if module._parameters[name] is not None:
                    self._places.setdefault(f"{prefix}.{name}" if prefix else name, []).append((module, name))
        self._tie()
        reasons = {name: reason for name in self._places if (reason := self._why_not_written(name)) is not None}
        if reasons:
            name, reason = next(iter(reasons.items()))
            more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            raise WeightsRefused(f"{name}{more} cannot be replaced: {reason}")

    def _tie(self) -> None:
        """Gives names that share a tensor the same list of (module, attribute) pairs, all of which `write` writes.

        Tied weights that are packed count as shared too, although the output matrix is then a separate copy of the
        embedding.
        """
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        tied = self._model.config.get_text_config().tie_word_embeddings and None not in ends
        by_tensor: dict[int, list[tuple[nn.Module, str]]] = {}
        for name, places in self._places.items():
            for module, attribute in places:
                is_end = tied and module in ends and attribute == "weight"
                key = 0 if is_end else id(module._parameters[attribute])
                shared = by_tensor.setdefault(key, [])
                if (module, attribute) not in shared:
                    shared.append((module, attribute))
            self._places[name] = shared

    def _why_not_written(self, name: str) -> str | None:
        found = (module.why_not_written for module, _ in self._places[name] if isinstance(module, Packable))
        return next((reason for reason in found if reason is not None), None)

    def _parameter(self, name: str) -> nn.Parameter:
        module, attribute = self._places[name][0]
        return module.get_parameter(attribute)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """Returns the names of all weights; only the first name, if several names share a tensor."""
        seen: set[int] = set()
        return [name for name, places in self._places.items() if id(places) not in seen and not seen.add(id(places))]

    def same(self, name: str) -> str:
        """Returns the name that `names` contains for the tensor with this name."""
        places = self._places[name]
        return next(one for one, held in self._places.items() if held is places)

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises WeightsRefused if a tensor with this name, shape and dtype cannot be written."""
        if name not in self._places:
            raise WeightsRefused(f"{name} is no tensor of {type(self._model).__name__}")
        expected = tuple(self._parameter(name).shape)
        if self._shards is not None:
            expected = self._shards.shape(name, expected)
        if tuple(shape) != expected:
            raise WeightsRefused(f"{name} has shape {list(shape)}, expected {list(expected)}")
        if dtype not in FLOATS:
            raise WeightsRefused(
                f"{name} is {str(dtype).removeprefix('torch.')}: weights are floats of 2, 4 or 8 bytes"
            )

    def converted(self, name: str, value: Tensor) -> Tensor:
        """Converts the value of a checked tensor to the dtype and device of the weight.

        Raises:
            WeightsRefused: the value is not finite in this dtype.
        """
        place = self._parameter(name)
        value = value.to(place.device, place.dtype)
        if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            what = "NaN" if value.isnan().any() else "infinity"
            raise WeightsRefused(f"{name} holds {what} as {shown(place.dtype)}")
        return value

    @torch.inference_mode()
    def write(self, name: str, value: Tensor) -> None:
        """Writes a converted value in place; the layers use it after `finish`."""
        for suffix in self._published(name):
            self._rows.put(suffix, value)
        self._tell("write", name, value)
        if self._shards is not None:
            value = self._shards.shard_of(name, value)
        for module, attribute in self._places[name]:
            if isinstance(module, Packable) and attribute == "weight":
                module.write(value)
            elif isinstance(module, PackableLinear):
                module.write_bias(value)
            else:
                module.get_parameter(attribute).data.copy_(value)

    @torch.inference_mode()
    def finish(self) -> None:
        """Makes the layers use the written values."""
        self._tell("finish")
        for module in self._model.modules():
            if callable(take := getattr(module, "take_written", None)):
                take()
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        if self._rows is not None:
            self._rows.publish()

    def _published(self, name: str) -> list[str]:
        """Returns the suffixes by which drafters know a weight; empty if drafters hold no copies of the weight."""
        modules = [module for module, attribute in self._places[name] if attribute == "weight"]
        return [] if self._rows is None else [self._ends[module] for module in modules if module in self._ends]

    def _tell(self, step: str, name: str = "", value: Tensor | None = None) -> None:
        """Makes the other ranks take a step with their shards."""
        if self._shards is not None and self._shards.tell is not None:
            self._shards.tell(step, name, value)

    def read(self, name: str) -> Tensor:
        """Returns the value of a weight, in its shape; the result may share memory with the layers."""
        self._tell("read", name)
        module, attribute = self._places[name][0]
        weight = dense_weight(module) if attribute == "weight" else None
        weight = self._parameter(name).data if weight is None else weight
        return weight if self._shards is None else self._shards.whole_of(name, weight)

    def save(self, name: str) -> list[Any]:
        """Returns copies in host memory, from which `restore` restores a weight exactly; other ranks keep their own."""
        self._tell("save", name)
        return [_save(*place) for place in self._places[name]]

    @torch.inference_mode()
    def restore(self, name: str, saved: list[Any]) -> None:
        """Writes back what `save` has returned; the layers use it after `finish`."""
        self._tell("restore", name)
        for (module, attribute), one in zip(self._places[name], saved, strict=True):
            if isinstance(module, Packable) and attribute == "weight":
                module.restore(one)
            elif isinstance(module, PackableLinear):
                module.write_bias(one)
            else:
                module.get_parameter(attribute).data.copy_(one)
        for suffix in self._published(name):
            self._rows.put(suffix, self.read(name))

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of each weight's bytes in row-major order, by name."""
        return {name: hashlib.sha256(_bytes_of(self.read(name))).hexdigest() for name in self.names()}

    @torch.inference_mode()
    def scramble(self) -> None:
        """Overwrites every weight with noise, so that users notice a weight that is not written afterwards."""
        for name in self.names():
            own = self._parameter(name)
            shape = tuple(own.shape) if self._shards is None else self._shards.shape(name, tuple(own.shape))
            self.write(name, own.new_empty(shape).normal_(std=_NOISE))

    def storages(self) -> Iterator[Tensor]:
        """Yields the tensors that hold the weights, one for each storage."""
        seen: set[int] = set()
        for module, attribute in (place for name in self.names() for place in self._places[name]):
            is_packable = isinstance(module, Packable) and attribute == "weight"
            for held in module.storages if is_packable else [module.get_parameter(attribute).data]:
                if (address := held.untyped_storage().data_ptr()) not in seen:
                    seen.add(address)
                    yield held


def _save(module: nn.Module, attribute: str) -> Any:
    if isinstance(module, Packable) and attribute == "weight":
        return module.save()
    return module.get_parameter(attribute).detach().to("cpu", copy=True)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def shown(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def named(names: list[str]) -> str:
    """Returns the first names of a list as one line."""
    return ", ".join(names[:_NUM_NAMED]) + (", .." if len(names) > _NUM_NAMED else "")
