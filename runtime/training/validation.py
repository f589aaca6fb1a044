"""Measures a head's acceptance during training with the engine that serves: verifier, head and channel run as in a
deployment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import LocalChannel, build_engine
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.training.evaluation import HeadAcceptance
from wingbeat.runtime.verifier.loading.loader import load_model

ChannelFactory = Callable[[ChannelSpec], LocalChannel]

_SEQUENCES_AT_ONCE = 16


@dataclass(frozen=True)
class EngineValidation:
    """A repeatable measurement: greedy continuations of the same prompts with chains of one length."""

    verifier: Path
    prompts: list[list[int]]
    num_tokens: int
    """New tokens per prompt."""
    chain: int
    """Length of the drafted chains."""
    channel_factory: ChannelFactory
    dtype: torch.dtype
    device: torch.device
    inside_verifier: bool = False
    """Whether the head is an MTP module, which is exported to a folder with the verifier's files."""

    def measure(self, export: Callable[[Path], None]) -> HeadAcceptance:
        """Export the head's weights, load the exported files as in serving, and generate text.

        The engine's verifier is loaded only during the measurement, because memory is scarce during training.
        """
        shape = SpeculationConfig(self.chain, 1, self.chain + 1)
        longest = max(map(len, self.prompts)) + self.num_tokens
        at_once = min(_SEQUENCES_AT_ONCE, len(self.prompts))
        limits = EngineConfig(max_num_seqs=at_once, max_model_len=longest, speculation=shape)
        config = EngineConfig(
            max_num_seqs=at_once,
            max_model_len=longest,
            num_kv_blocks=1 + at_once * limits.max_blocks_per_seq,
            speculation=shape,
        )
        with TemporaryDirectory() as folder:
            export(Path(folder))
            verifier, source = (folder, "auto") if self.inside_verifier else (self.verifier, folder)
            loaded = load_model(verifier, self.dtype, self.device)
            options = DrafterOptions(self.dtype, self.device)
            drafter = load_drafter(source, TargetDescription.from_checkpoint(verifier), shape, options)
        engine = build_engine(loaded, config, drafter, self.channel_factory)
        params = SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(self.prompts):
            engine.add_request(Request(str(index), tuple(prompt), params))
        metrics = SpeculationMetrics()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.metrics is not None:
                    metrics.add(output.metrics)
        return _acceptance(metrics, self.chain)


def _acceptance(metrics: SpeculationMetrics, chain: int) -> HeadAcceptance:
    right = metrics.num_accepted_tokens_per_pos
    accepted = right + [0] * (chain - len(right))
    return HeadAcceptance.of_counts(accepted, [metrics.num_drafts, *accepted[:-1]], metrics.num_drafts)
