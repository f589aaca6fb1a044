"""The host waits for its device once a round, for the tokens, and nowhere before."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.runtime.engine.arrivals import Load, drafter_of, ending
from tests.runtime.models import Run, engine_config, greedy_params, new_engine, random_model, random_prompts
from tests.runtime.recorded_graphs import WAITS
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.engine.outcome_writer import write_numbers
from wingbeat.runtime.protocol.messages import DrafterFigures, RoundHeader
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)


class Blindfold(TorchDispatchMode):
    """Fails where the host looks at device data, which on an accelerator would be a wait for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        waits = by_mask or name in WAITS
        assert not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


WRITERS = {write_numbers.__code__, RoundHeader.write.__code__}
"""Functions that may call `numpy`: they write to host memory; `write_numbers` copies it to a device."""


def only_to_write(tensor):
    """Replacement of `Tensor.numpy` that only `WRITERS` may call."""
    assert sys._getframe(1).f_code in WRITERS, "numpy looks at the device's data"
    return LOOKS["numpy"](tensor)


def blind(owner, name, monkeypatch):
    """Wrap a method so that it fails if it reads any tensor's data."""
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        with Blindfold(), monkeypatch.context() as patch:
            for look in ("tolist", "__array__"):
                patch.setattr(torch.Tensor, look, None)
            patch.setattr(torch.Tensor, "numpy", only_to_write)
            return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_the_blindfold_is_tight():
    for look in (lambda t: int(t.max()), lambda t: bool(t.any()), lambda t: t[t > 0]):
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode, pytest.raises(AssertionError, match="waits for the device"), Blindfold():
                look(torch.arange(3))


def seeing(method):
    """Wrap a method of the drafter's side, which may read tensors because it is another process."""

    def wrapped(*args, **kwargs):
        with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
            for look, original in LOOKS.items():
                patch.setattr(torch.Tensor, look, original)
            return method(*args, **kwargs)

    return wrapped


class SeeingChannel(InProcessChannel):
    """A channel whose drafter may read tensors."""

    @property
    def pump(self):
        return self._doorbell.pump

    @pump.setter
    def pump(self, pump):
        self._doorbell.pump = seeing(pump)


LOOKS = {look: getattr(torch.Tensor, look) for look in ("tolist", "numpy", "__array__")}


@pytest.mark.parametrize("kind", ["none", "right", "eagle", "ngram"])
def test_nothing_before_the_wait_looks_at_device_data(ref, engine_of, monkeypatch, kind):
    loaded, end = ending(ref)
    load = Load(ref, end, seed=11, count=12)
    engine = engine_of(loaded, drafter_of(kind, ref), on_host=False, channel_factory=SeeingChannel)
    # Replaced as on a device; on a host the tokens are read from where they are stored.
    monkeypatch.setattr(engine.drafting, "_steps", torch.arange(1, engine.config.speculation.max_path + 1))
    # A reply's header is always in host memory.
    monkeypatch.setattr(DrafterFigures, "read", seeing(DrafterFigures.read))
    for owner, name in [
        (engine.scheduler, "schedule"),
        (engine.slots, "load"),
        (engine.drafting, "collect"),
        (engine.runner, "launch"),
        (engine.drafting, "publish"),
    ]:
        blind(owner, name, monkeypatch)
    tokens, _, reasons = load.play(engine)
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    assert engine.speculation.num_drafts > 0 or kind == "none"


@pytest.mark.gpu
def test_on_a_gpu_only_the_tokens_are_waited_for():
    loaded = prepare_model(random_model("llama").to("cuda"), "llama")
    prompts = random_prompts((5, 40, 17))
    tokens = {}
    for overlap in (False, None):
        engine = new_engine(loaded, engine_config(overlap=overlap))
        assert engine.overlap is (overlap is None)
        run = Run(engine, prompts, greedy_params(48))
        run.step()  # the first round compiles kernels and pins memory
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens[overlap] = run.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine.model.remove_taps()
    assert tokens[None] == tokens[False]
