"""Prompts of the short texts with which drafters, graphs and conventions are tested."""

import torch

from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import LoadedModel

_QUESTIONS = (
    "What is a prime number?",
    "Write a short poem about the sea.",
    "How do I read a file line by line in Python?",
    "Explain why the sky is blue.",
    "Give me three ideas for a birthday present.",
    "Summarise the story of Romeo and Juliet.",
    "What should I look at when buying a used car?",
    "Translate 'good morning, how are you?' into French.",
    "Write a function that reverses a linked list.",
    "What is the capital of Australia, and why not Sydney?",
    "How many grams are in two pounds?",
    "Draft a polite reply that declines an invitation.",
    "What happened in the year 1969?",
    "Name five vegetables that grow in the shade.",
    "Explain the difference between a list and a tuple.",
    "How does a vaccine work?",
)
_BEGINNINGS = (
    "The history of the city begins with",
    "def read_config(path):\n    ",
    "Once upon a time there was a",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "In mathematics, a function is",
    "class Stack:\n    def __init__(self):\n        ",
    "The weather forecast for the weekend is",
    "for name in sorted(os.listdir(path)):\n    ",
    "Return a copy of the list in which",
    "The committee decided that",
    "    try:\n        return self._cache[key]\n    ",
    "To install the package, run the following",
    "<html>\n<head>\n<title>",
    "She opened the door and saw",
    "if __name__ == '__main__':\n    ",
    "According to the report, the company",
)


def trial_requests(
    loaded: LoadedModel, tokenizer: Tokenizer | None, num_texts: int, num_tokens: int, max_model_len: int
) -> list[Request]:
    """Returns `num_texts` requests of up to `num_tokens` tokens.

    A greedy request for each prompt is followed by a sampled request for each prompt.

    The same verifier always gets the same requests. If max_model_len is too short for prompt and text, prompts are cut
    to half of max_model_len.
    """
    prompts = trial_prompts(loaded, tokenizer)
    requests = []
    for index in range(num_texts):
        turn, row = divmod(index, len(prompts))
        prompt = prompts[row][-max(1, max_model_len // 2) :]
        params = SamplingParams(
            max_tokens=min(num_tokens, max_model_len - len(prompt)),
            temperature=float(turn > 0),
            seed=index,
            ignore_eos=True,
        )
        requests.append(Request(f"trial-{index}", tuple(prompt), params))
    return requests


def trial_prompts(loaded: LoadedModel, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns token ids of a few prompts.

    If the tokenizer has a chat template, the prompts are questions in this template, because chat models produce
    unusual text without the template. Otherwise the prompts are beginnings of texts; without a tokenizer they are
    random tokens.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, loaded.vocab_size, (len(_BEGINNINGS), 2), generator=generator).tolist()
    try:
        return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in _QUESTIONS]
    except ValueError:  # no chat template, or a template that refuses these messages
        return [tokenizer.encode(text) for text in _BEGINNINGS]
