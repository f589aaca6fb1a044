"""Grammars beside prompts that are captured."""

from dataclasses import replace

import pytest

from tests.runtime.grammar.world import SPECS, TOKENIZER, Constrained, generate, params_of, text_of
from tests.runtime.models import engine_config, reference
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.graphs.graph_runner import Stage


@pytest.mark.slow
def test_first_tokens_behind_a_captured_prompt_match_their_grammar():
    """First tokens also equal those of a host round: the masks arrive before tokens are chosen."""
    loaded = reference("demo", 1).loaded
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    prompts, params = [TOKENIZER.encode("value = ")] * 2, [params_of(SPECS[2], seed, max_tokens=2) for seed in (0, 1)]
    plain, _ = generate(loaded, grammars, prompts, params)
    limits = engine_config(max_num_seqs=2, max_num_batched_tokens=32, overlap=False)
    engine = Engine(loaded, limits, graph_device=RecordingDevice())
    params = [replace(param, speculation=False) for param in params]
    assert Constrained(engine, grammars, prompts, params).finish() == plain
    assert engine.stats().graphs.replays[Stage.BASE_PROMPTS] == 1
    assert all(text_of(tokens)[0] in '"ynp' for tokens in plain)
