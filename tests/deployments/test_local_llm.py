"""`wingbeat.LLM`: a pair in this process, by the settings of `wingbeat generate`."""

from pathlib import Path

import pytest

import wingbeat
from wingbeat.deployments.options.problems import SettingsError
from wingbeat.runtime.scheduling.request import SamplingParams


def test_it_generates_with_a_model_and_a_drafter_alone(tiny_model: Path):
    llm = wingbeat.LLM(tiny_model, "ngram", max_num_seqs=2, max_model_len=64)
    prompt = llm.tokenizer.encode("abcabc")
    (one,), (two,) = (llm.generate([prompt], [SamplingParams(max_tokens=8, ignore_eos=True)]) for _ in range(2))
    assert len(one.token_ids) == 8
    assert one.token_ids == two.token_ids


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"model": "/no/such"}, "model is '/no/such': there is no folder /no/such"),
        ({"dtyp": "x"}, "there is no setting dtyp: did you mean dtype?"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(settings: dict, line: str):
    with pytest.raises(SettingsError) as refused:
        wingbeat.LLM(**settings)
    assert str(refused.value).startswith(line)
    assert len(str(refused.value).splitlines()) == 1
