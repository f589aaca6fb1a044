"""`wingbeat.LLM`: texts, token ids and conversations in, texts out; errors are one line that names the argument."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest

import wingbeat
from tests.deployments.offline.conftest import TEMPLATE
from wingbeat import LLM, SamplingParams
from wingbeat.deployments.options.problems import SettingsError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "hi"}]


def texts(llm: LLM, prompts, params: SamplingParams = GREEDY) -> list[str]:
    return [result.text for result in llm.generate(prompts, params)]


def test_a_text_is_continued(llm: LLM):
    (result,) = llm.generate("abcabc", max_tokens=8, temperature=0, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (8, "length")
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert result.prompt == "abcabc"
    assert result.prompt_token_ids == llm.tokenizer.encode("abcabc")
    assert result.metrics.acceptance_length >= 1
    assert result.outputs[0].text == result.text


def test_a_list_is_in_order_whatever_runs_at_once(llm: LLM):
    prompts = ["abcabc", "xy" * 20, "q", "hello there"]
    assert texts(llm, prompts) == [text for prompt in prompts for text in texts(llm, prompt)]


def test_token_ids_and_dicts_are_prompts_too(llm: LLM):
    ids = llm.tokenizer.encode("abcabc")
    (alone,) = texts(llm, "abcabc")
    assert texts(llm, ids) == texts(llm, tuple(ids)) == [alone]
    mixed = [ids, "abcabc", {"prompt": "abcabc"}, {"prompt_token_ids": ids}]
    assert texts(llm, mixed) == texts(llm, iter(mixed)) == [alone] * 4
    assert llm.generate([], GREEDY) == []


@pytest.mark.slow
def test_a_conversation_is_answered_as_its_template_writes_it(llm: LLM):
    (answer,) = llm.chat(CONVERSATION, GREEDY)
    assert answer.prompt == "<user>hi<assistant>"
    assert answer.token_ids == llm.generate("<user>hi<assistant>", GREEDY)[0].token_ids
    other = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}]
    several = llm.chat([CONVERSATION, other], GREEDY, add_generation_prompt=False, continue_final_message=None)
    assert [one.prompt for one in several] == ["<user>hi", "<user>hello<assistant>so"]
    (shouted,) = llm.chat(CONVERSATION, GREEDY, chat_template=TEMPLATE.replace("<", "["))
    assert shouted.prompt == "[user>hi[assistant>"


def test_an_answer_may_be_as_long_as_the_model_has_room_a_continuation_has_sixteen_tokens(llm: LLM):
    (answer,) = llm.chat(CONVERSATION, temperature=0, ignore_eos=True)
    assert len(answer.prompt_token_ids) + len(answer.token_ids) == llm.max_model_len == 128
    (continued,) = llm.generate("hi", temperature=0, ignore_eos=True)
    assert len(continued.token_ids) == 16


def test_a_stop_string_ends_a_text_before_it_and_the_others_go_on(llm: LLM):
    whole, other = llm.generate(["abcabc", "xy"], temperature=0, max_tokens=24, ignore_eos=True)
    stop = whole.text[5:7]
    short, same = llm.generate(
        ["abcabc", "xy"],
        [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=given) for given in (stop, None)],
    )
    assert short.text == whole.text[: whole.text.index(stop)]
    assert (short.finish_reason, short.outputs[0].stop_reason) == ("stop", stop)
    assert short.metrics.num_drafts <= whole.metrics.num_drafts
    assert same.text == other.text
    (shown,) = llm.generate("abcabc", temperature=0, max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert shown.text.endswith(stop)
    last = whole.token_ids[2]
    (by_token,) = llm.generate("abcabc", temperature=0, max_tokens=24, stop_token_ids=(last,))
    assert by_token.outputs[0].stop_reason == last


def test_sampling_goes_by_its_seed_and_choices_differ(llm: LLM):
    def sampled(**fields) -> list[str]:
        return [choice.text for choice in llm.generate("abc", max_tokens=12, ignore_eos=True, **fields)[0].outputs]

    assert sampled(seed=3, n=2) == sampled(seed=3, n=2)
    first, second = sampled(seed=3, n=2)
    assert first != second
    assert sampled(seed=4) == [second]
    assert sampled() != sampled(), "no seed is given, so one is drawn"
    assert sampled(seed=3, speculation=False) == [first]


def test_log_probabilities_are_reported_where_they_are_asked_for(llm: LLM):
    (result,) = llm.generate("abc", temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    choice = result.outputs[0]
    assert [len(token.top) for token in choice.logprobs] == [2] * 4
    assert [token.top[0][0] for token in choice.logprobs] == choice.token_ids
    assert len(result.prompt_logprobs) == 2
    assert llm.generate("abc", GREEDY)[0].outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"max_token": 3}, "there is no sampling parameter max_token: did you mean max_tokens?"),
        ({"max_new_tokens": 3}, "there is no sampling parameter max_new_tokens: did you mean max_tokens?"),
        ({"temperature": 9}, "Invalid 'temperature': input should be less than or equal to 2."),
        ({"stop": [1]}, "'stop' must be a string or a list of strings."),
        ({"best_of": 2}, "'best_of' with this value is not supported"),
        ({"logit_bias": {999: 1.0}}, "'logit_bias' holds token id 999; the vocabulary has ids 0 to 256."),
        ({"max_tokens": 500}, "prompts[0] has 1 tokens and max_tokens is 500: max_model_len is 128;"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9: the answer to prompts[0] may have at most 3 tokens"),
        ({"structured_outputs": {"rege": "a"}}, "'structured_outputs' holds 0 of json, regex, choice,"),
        ({"sampling_params": {"n": 2}}, "sampling_params is of the type dict: give wingbeat.SamplingParams"),
        ({"sampling_params": [GREEDY]}, "sampling_params has 1 entries: there are 2 prompts"),
        ({"sampling_params": [GREEDY, 3]}, "sampling_params[1] is of the type int: give wingbeat.SamplingParams"),
        ({"sampling_params": GREEDY, "n": 2}, "n is given beside sampling_params: put it into sampling_params"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_one_line_that_names_it(llm: LLM, fields: dict, line: str):
    with pytest.raises(ValueError, match=re.escape(line)) as refused:
        llm.generate(["a", "b"], **fields)
    assert len(str(refused.value).splitlines()) == 1
    assert texts(llm, "abcabc"), "the model is as it was"


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (5, "prompts is of the type int: give a string, a list of token ids, or a list of these"),
        (b"x", "prompts is of the type bytes: give"),
        (["a", ""], "prompts[1] is empty: give at least one token"),
        (["a", None], "prompts[1] is of the type NoneType: give"),
        (["a", []], "prompts[1] is empty: give"),
        ({"text": "a"}, "prompts has the keys text: give one of prompt and prompt_token_ids"),
        ([[0], [-4]], "prompts[1] holds token id -4: the vocabulary has ids 0 to 256"),
        (["a", "b" * 4000], "prompts[1] has more than 128 tokens: max_model_len is 128; shorten the prompt or raise"),
        ("b" * 128, "prompts has 128 tokens and max_tokens is 8: max_model_len is 128; shorten"),
    ],
    ids=str,
)
def test_a_wrong_prompt_is_one_line_that_names_it_and_none_is_run(llm: LLM, prompts, line: str):
    with pytest.raises(ValueError, match=re.escape(line)):
        llm.generate(prompts, GREEDY)
    assert texts(llm, "abcabc"), "the model is as it was"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("messages", "fields", "line"),
    [
        ("hi", {}, "messages is of the type str: give a list of messages, or a list of such lists"),
        ([{"role": "usr", "content": "hi"}], {}, "'messages[0].role' is 'usr', must be one of system,"),
        ([CONVERSATION, [{"role": "user"}]], {}, "messages[1]: Missing required parameter: 'messages[0].content'."),
        (CONVERSATION, {"tools": 3}, "'tools'"),
        (CONVERSATION, {"chat_template": "{% if"}, "messages cannot be written as a prompt: "),
    ],
    ids=str,
)
def test_a_wrong_conversation_is_one_line_that_names_it(llm: LLM, messages, fields: dict, line: str):
    with pytest.raises(ValueError, match=re.escape(line)) as refused:
        llm.chat(messages, GREEDY, **fields)
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_without_a_chat_template_says_so(tiny_model: Path):
    llm = wingbeat.LLM(tiny_model, "none", max_num_seqs=1, max_model_len=64)
    with pytest.raises(ValueError, match="the model has no chat template"):
        llm.chat(CONVERSATION, GREEDY)


@pytest.mark.slow
def test_a_budget_bounds_the_memory_of_the_kv_pool(tiny_model: Path):
    budget = 256 * 1024
    llm = wingbeat.LLM(tiny_model, "none", max_num_seqs=8, kv_cache_memory_bytes=budget)
    cache = llm._llm.engine.cache
    assert budget / 2 < cache.num_blocks * cache.block_bytes <= budget
    assert len(texts(llm, [f"{index} " * 20 for index in range(8)])) == 8, "fewer run at once, and all are answered"
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes is 1000: "):
        wingbeat.LLM(tiny_model, "none", kv_cache_memory_bytes=1000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("prompts", "fields", "stream", "shown"),
    [
        (["a", "b", "c"], {}, Terminal, True),
        (["a", "b", "c"], {}, io.StringIO, False),
        (["a", "b", "c"], {"progress": False}, Terminal, False),
        (["a", "b", "c"], {"use_tqdm": False}, Terminal, False),
        ("a", {}, Terminal, False),
    ],
    ids=str,
)
def test_progress_of_many_prompts_is_drawn_on_a_terminal(llm: LLM, monkeypatch, prompts, fields, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(prompts, GREEDY, **fields)
    assert ("3/3" in sys.stderr.getvalue()) is shown
    assert shown or not sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("level", "stream", "shown"),
    [(logging.WARNING, Terminal, 1), (logging.WARNING, io.StringIO, 0), (logging.INFO, Terminal, 0)],
    ids=str,
)
def test_a_model_that_loads_is_told_once_on_a_terminal_or_in_the_log(
    chat_model: Path, monkeypatch, caplog, level: int, stream: type, shown: int
):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "dumb")  # a line is written once, when loading ends
    with caplog.at_level(level, "wingbeat"):
        wingbeat.LLM(chat_model, "none", max_num_seqs=1, max_model_len=64, dtype="float32", device="cpu")
    line = f"oading the model {chat_model} (float32 on cpu)"
    assert "".join(sys.stderr.getvalue().split()).count("".join(line.split())) == shown
    assert sum(line in text for text in caplog.messages) == (level == logging.INFO)


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
