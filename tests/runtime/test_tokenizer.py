"""Text that streams equals text decoded at once, whatever the tokenizer, the text and the cuts."""

import random

import pytest

from tests.runtime.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.text_stream import IncrementalDetokenizer, StopMatcher, TextStream
from wingbeat.runtime.tokenizer import Tokenizer

TEXTS = ["Hello world, naïve café", "日本語 🦋🐝 text", "  def f(x):\n    return '�' # é", "a", "\n\n \t", "👩‍👩‍👧‍👦!"]


@pytest.fixture(params=[byte_level_tokenizer, byte_fallback_tokenizer], ids=["byte-level", "byte-fallback"])
def tokenizer(request) -> Tokenizer:
    return request.param()


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_text(tokenizer, text):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text


@pytest.mark.few(3)
@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_continues_its_prompt_wherever_the_prompt_ends(tokenizer, text):
    text = text.replace("�", "ü") * 4
    token_ids = tokenizer.encode(text)
    for cut in range(1, len(token_ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, token_ids[:cut])
        answer = "".join(detokenizer.push([token_id]) for token_id in token_ids[cut:]) + detokenizer.flush()
        finished_prompt = text[: len(text) - len(answer)]
        assert finished_prompt + answer == text
        assert len(tokenizer.encode(finished_prompt)) <= cut + (not finished_prompt)


def test_no_piece_ends_inside_a_character(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode("🦋é日" * 20)]
    assert not any("�" in piece for piece in pieces)


def test_streaming_random_tokens_equals_decoding_them_at_once():
    tokenizer = byte_level_tokenizer()
    generator = random.Random(0)
    for _ in range(50):
        token_ids = [generator.randrange(260) for _ in range(200)]
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces, start = [], 0
        while start < len(token_ids):
            size = generator.randint(1, 5)
            pieces.append(detokenizer.push(token_ids[start : start + size]))
            start += size
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(token_ids)


def test_work_per_token_does_not_grow_with_the_text():
    class Counting(Tokenizer):
        longest = 0

        def decode(self, token_ids, skip_special_tokens=True):
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = Counting(byte_level_tokenizer().hugging_face)
    detokenizer = IncrementalDetokenizer(tokenizer, context=[1] * 1000)
    for token_id in tokenizer.encode("é") * 300 + [140] * 300:
        detokenizer.push([token_id])
    assert tokenizer.longest <= 32


def test_special_tokens_leave_no_text(tokenizer):
    eos = tokenizer.hugging_face.eos_token_id
    stream = TextStream(tokenizer)
    token_ids = [*tokenizer.encode("Hello"), eos]
    assert stream.push(token_ids).text + stream.flush().text == "Hello"


def _reference_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_stop_strings_match_the_definition_for_every_cut():
    generator = random.Random(1)
    for _ in range(2000):
        text = "".join(generator.choice("ab\n") for _ in range(generator.randint(0, 14)))
        stops = ["".join(generator.choice("ab\n") for _ in range(generator.randint(1, 4))) for _ in range(3)]
        matcher, got, stopped, start = StopMatcher(stops), "", False, 0
        while start < len(text) and not stopped:
            size = generator.randint(1, 4)
            piece, stopped = matcher.push(text[start : start + size])
            got += piece
            start += size
        assert (got if stopped else got + matcher.flush(), stopped) == _reference_stop(text, stops)


def test_text_that_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == ("the ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("EN") == ("EN", False)
    assert matcher.push("D and more") == ("", True)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_stop_string_counts_the_token_that_completed_it():
    tokenizer = byte_level_tokenizer()
    stream = TextStream(tokenizer, stops=["EN"])
    got = stream.push(tokenizer.encode("abEN and more"))
    assert (got.text, got.num_tokens, got.stopped) == ("ab", 4, True)


def test_without_a_stop_the_held_text_comes_at_the_end():
    tokenizer = byte_level_tokenizer()
    stream = TextStream(tokenizer, stops=["STOP"])
    assert stream.push(tokenizer.encode("xSTO")).text == "x"
    assert stream.flush().text == "STO"


def test_a_stop_string_in_the_prompt_does_not_end_the_answer():
    tokenizer = byte_level_tokenizer()
    stream = TextStream(tokenizer, context=tokenizer.encode("EN"), stops=["EN"])
    assert stream.push(tokenizer.encode("x")) == ("x", 1, False)


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_conversation_becomes_a_prompt_for_the_answer():
    tokenizer = byte_level_tokenizer(chat_template=CHAT_TEMPLATE)
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "system:be kind;user:hi;assistant:"


def test_a_refusing_or_missing_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        byte_level_tokenizer().encode_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="no tools"):
        byte_level_tokenizer(chat_template=CHAT_TEMPLATE).encode_chat([{"role": "tool", "content": "hi"}])


def test_what_a_template_reads_beside_the_messages_is_handed_to_it():
    tokenizer = byte_level_tokenizer(chat_template=CHAT_TEMPLATE + "{{ tools[0].name }}")
    messages = [{"role": "user", "content": "hi"}]
    variables = {"tools": [{"name": "f"}], "add_generation_prompt": False}
    assert tokenizer.render_chat(messages, variables) == "user:hi;f"
    with pytest.raises(ValueError, match="refuses the messages"):
        tokenizer.render_chat([{"role": "user", "content": None}])


def test_special_tokens_stay_where_they_are_asked_for_but_for_the_one_that_ends_the_text():
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.hugging_face.eos_token_id
    token_ids = [*tokenizer.encode("a", add_special_tokens=False), eos, eos]
    mark = tokenizer.decode([eos], skip_special_tokens=False)
    assert mark
    for skips, text in ((True, "a"), (False, "a" + mark)):
        stream = TextStream(tokenizer, skip_special_tokens=skips)
        got, finish = stream.take(token_ids, FinishReason.STOP)
        assert (got.text, got.num_tokens, finish) == (text, len(token_ids), FinishReason.STOP)
    stream = TextStream(tokenizer, skip_special_tokens=False)
    assert stream.take(token_ids, FinishReason.LENGTH)[0].text == "a" + mark + mark


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    assert Tokenizer.find(tmp_path) is None


def test_a_saved_tokenizer_loads_and_never_truncates(tmp_path):
    saved = byte_level_tokenizer()
    saved.hugging_face.backend_tokenizer.enable_truncation(4)
    saved.hugging_face.save_pretrained(tmp_path)
    text = "Hello world"
    for tokenizer in (Tokenizer.load(tmp_path), Tokenizer.find(tmp_path)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'),
    ],
    ids=["truncated", "empty", "list", "list of settings", "code of its own"],
)
def test_a_damaged_tokenizer_is_one_line_that_names_the_folder(tmp_path, monkeypatch, file, content):
    """Whatever transformers raises: a replica that dies of something else is started again and again."""
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked whether to run code"))
    byte_level_tokenizer().hugging_face.save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"no tokenizer in {tmp_path}: .") as caught:
        Tokenizer.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
