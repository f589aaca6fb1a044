"""An answer's text is what its tokens add to the prompt's, wherever the prompt is cut and however the tokens arrive."""

import random
from collections.abc import Sequence

import pytest

from tests.runtime.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.scheduling.request import FinishReason
from wingbeat.runtime.text_stream import IncrementalDetokenizer, TextStream
from wingbeat.runtime.tokenizer import Tokenizer

ALPHABETS = [
    "漢字漢語日本",
    "😀🦋👩‍👩‍👧‍👦🇩🇪",
    "e\u0301a\u0308n\u0303é",
    "שלום عليكم \u200f\u202eאב",
    "abc wor ld",
    "  \n\t",
]


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    """Merges that begin and end inside characters."""
    return Tokenizer.load(demo_pair().verifier)


@pytest.fixture(params=["demo", "byte-level", "byte-fallback"])
def tokenizer(request, demo_tokenizer) -> Tokenizer:
    made = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}
    return demo_tokenizer if request.param == "demo" else made[request.param]()


def a_text(draw: random.Random) -> str:
    return "".join(draw.choice(draw.choice(ALPHABETS)) for _ in range(draw.randint(1, 30)))


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], draw: random.Random) -> str:
    """In pieces of random lengths."""
    detokenizer, pieces, start = IncrementalDetokenizer(tokenizer, prompt), [], 0
    while start < len(output):
        size = draw.randint(1, 5)
        pieces.append(detokenizer.push(output[start : start + size]))
        start += size
    return "".join(pieces) + detokenizer.flush()


def added(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> str:
    """decode(prompt + output) minus decode(prompt): a character that both share belongs to who completes it."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    shared = next((i for i in range(len(before)) if whole[i : i + 1] != before[i]), len(before))
    return whole[shared:]


@pytest.mark.few(1)
def test_a_text_is_cut_between_prompt_and_answer_at_a_character(tokenizer):
    draw = random.Random(2)
    for _ in range(300):
        text = a_text(draw)
        token_ids = tokenizer.encode(text)
        cut = draw.randint(1, len(token_ids))
        finished = max(
            (tokenizer.decode(token_ids[:end]) for end in range(cut + 1)),
            key=lambda start: len(start) if text.startswith(start) else -1,
        )
        assert streamed(tokenizer, token_ids[:cut], token_ids[cut:], draw) == text[len(finished) :]


@pytest.mark.parametrize("make", [byte_level_tokenizer, lambda: Tokenizer.load(demo_pair().verifier)])
def test_answers_to_random_bytes_hold_nothing_of_the_prompt(make):
    tokenizer, draw = make(), random.Random(3)
    size = len(tokenizer.hugging_face)
    for _ in range(400):
        prompt = [draw.randrange(size) for _ in range(draw.choice([1, 1, 2, 3, 5, 20]))]
        output = [draw.randrange(size) for _ in range(draw.choice([1, 2, 3, 40]))]
        assert streamed(tokenizer, prompt, output, draw) == added(tokenizer, prompt, output), (prompt, output)


def test_words_without_bytes_keep_their_spaces():
    tokenizer, draw = metaspace_tokenizer(), random.Random(4)
    for _ in range(200):
        token_ids = [draw.randrange(2, len(tokenizer.hugging_face)) for _ in range(draw.randint(2, 40))]
        cut = draw.randint(1, len(token_ids))
        prompt, output = token_ids[:cut], token_ids[cut:]
        assert streamed(tokenizer, prompt, output, draw) == added(tokenizer, prompt, output)


@pytest.mark.slow
def test_a_run_of_bytes_that_is_no_text_takes_nothing_back():
    """The decoder spells a run as text only where all of it is valid: the prompt's end could become U+FFFD again."""
    tokenizer, draw = byte_fallback_tokenizer(), random.Random(5)
    first_byte = tokenizer.hugging_face.convert_tokens_to_ids("<0x00>")
    letter = tokenizer.hugging_face.convert_tokens_to_ids("a")
    for _ in range(400):
        prompt = tokenizer.encode(draw.choice(["漢", "漢字漢字", "w漢"]))[: draw.randint(1, 14)]
        output = [first_byte + draw.randrange(128, 256) for _ in range(draw.randint(1, 40))] + [letter]
        texts = {streamed(tokenizer, prompt, output, random.Random(seed)) for seed in range(4)}
        assert len(texts) == 1, "the text depends on the pieces that tokens came in"
        (text,) = texts
        assert text.endswith("a")
        assert text.count("\ufffd") <= len(output) - 1


def test_a_long_run_of_tokens_that_are_no_text_leaves_the_next_word_its_space():
    """As the many placeholders of an image at a prompt's end."""
    tokenizer = byte_fallback_tokenizer()
    eos = tokenizer.hugging_face.eos_token_id
    prompt, answer = [*tokenizer.encode("wow"), *[eos] * 600], tokenizer.encode("wow", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    assert "".join(detokenizer.push([token_id]) for token_id in answer) == " wow"


def test_stop_strings_do_not_match_the_end_of_the_prompt():
    tokenizer = byte_level_tokenizer()
    for prompt in (tokenizer.encode("漢")[:1], tokenizer.encode("x漢")[:3], tokenizer.encode("\ufffd")):
        stream = TextStream(tokenizer, prompt, stops=["\ufffd"])
        got, finish = stream.take(tokenizer.encode("ab"), FinishReason.LENGTH)
        assert (got.text, finish) == ("ab", FinishReason.LENGTH)


def test_an_echoed_prompt_and_its_answer_are_the_text_of_both():
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode("x漢y")
    for cut in range(1, len(token_ids)):
        for output in (token_ids[cut:], tokenizer.encode("a")):
            stream = TextStream(tokenizer, token_ids[:cut], echoes=True)
            got, _ = stream.take(output, FinishReason.LENGTH)
            echo = tokenizer.decode(token_ids[:cut]).removesuffix(stream.context_rest)
            assert echo + got.text == tokenizer.decode([*token_ids[:cut], *output])


def test_work_per_token_is_bounded_whatever_the_tokens():
    class Counting(Tokenizer):
        longest = 0

        def decode(self, token_ids, skip_special_tokens=True):
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    for made in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        tokenizer = Counting(made.hugging_face)
        eos, wide = tokenizer.hugging_face.eos_token_id, tokenizer.encode("漢", add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer, context=wide * 300)
        for output in ([eos] * 300, wide[:1] * 300, wide[:2] * 300, wide * 100, [eos, wide[0]] * 300):
            for token_id in output:
                detokenizer.push([token_id])
        assert tokenizer.longest <= 40
