"""Writes the prompts that SmolLM2 answers to train its draft head; the sources' own answers are not used.

Reads checkouts of public repositories and a list of Debian's package descriptions:

    python make_prompts.py --spec-bench Spec-Bench --gsm8k grade-school-math --self-instruct self-instruct \\
        --descriptions Translation-de --output prompts.jsonl

Sources: hemingkx/Spec-Bench (Apache-2.0; every sixth question is held out for measurements), openai/grade-school-math
(MIT), yizhongw/self-instruct (Apache-2.0; including its share of the P3 prompts), docstrings of Python's standard
library, Debian's i18n/Translation-de.
"""

import argparse
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT_EVERY = 6
"""Questions at multiples of this index are held out for measurements."""
_WORDS = 260
"""Maximum words of a text that a prompt quotes: prompt and answer share the recording's length."""
_SUMMARIES = (
    "Summarize: {}",
    "{}\n\nTL;DR",
    "Write a short summary of this text.\n\n{}",
    "What are the key points?\n\n{}",
)
_DOCSTRINGS = (
    "Explain in plain words what `{name}` in Python does.\n\n{text}",
    "Write a short example program that uses `{name}` of Python's standard library.",
    "What is `{name}` used for in Python?",
    "Rewrite this documentation as a friendly tutorial:\n\n{text}",
    "Write three questions and answers about the following text.\n\n{text}",
    "Give a list of common mistakes when using `{name}` in Python and how to avoid them.",
    "Turn this text into a bulleted list:\n\n{text}",
    "Write a Python function with tests that does what this text describes:\n\n{text}",
)
_WRITING = (
    "Write a blog post about {}.",
    "Explain {} to a ten-year-old.",
    "Write a short story in which {} matters.",
    "Write a persuasive email to a colleague about {}.",
    "Compare two views on {} and say which is better founded.",
    "Describe the history of {} and its effect on society today.",
    "What are the most important facts about {}? Answer as a list.",
    "Pretend to be a famous teacher. What would you say about {}?",
    "Give a step-by-step plan for somebody who wants to learn about {}.",
    "How would you write a poem about {}? Write it.",
)
_MODULES = """
argparse asyncio base64 bisect calendar collections configparser contextlib copy csv datetime decimal difflib
email.message enum fractions functools glob gzip hashlib heapq hmac html http.client http.server inspect io
ipaddress itertools json logging math mimetypes multiprocessing.pool os os.path pathlib pickle platform pprint
queue random re sched secrets select shelve shlex shutil signal smtplib socket sqlite3 statistics string subprocess
tarfile tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest urllib.parse
urllib.request uuid warnings weakref xml.dom.minidom xml.etree.ElementTree zipfile zlib
"""
_TOPICS = """
photosynthesis; the French Revolution; inflation; black holes; bread baking; chess; the water cycle; democracy;
vaccines; solar energy; earthquakes; Shakespeare; the internet; plate tectonics; jazz; human rights; climate
change; bees; electric cars; supply and demand; the Roman Empire; DNA; music theory; time management; public
speaking; gardening; coral reefs; volcanoes; artificial intelligence; the moon landing; meditation; basketball;
coffee; bicycles; trade unions; the stock market; gravity; whales; the Silk Road; Impressionism; antibiotics;
rainforests; quantum mechanics; marathon running; libraries; tea; robots; the printing press; urban planning; ocean
currents; sleep; friendship; honesty; online learning; healthy eating; recycling; the pyramids; opera; mountain
climbing; the periodic table; magnets; photography; railways; wine; maps; astronomy; glaciers; a trip to Japan; a
lost dog; a job interview; a birthday party; moving to a new city; a broken computer; a school play
"""


def main() -> None:
    """Writes the prompts, shuffled, so that every prefix of the file is a fair sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("spec-bench", "gsm8k", "self-instruct", "descriptions", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    rng = random.Random(0)
    kinds: list[tuple[Iterable[str], int]] = [
        (spec_bench(options.spec_bench), 10**6),
        (grade_school(options.gsm8k), 3200),
        (instructions(options.self_instruct), 10**6),
        (summaries(options.self_instruct), 2100),
        (questions(options.self_instruct), 2600),
        (with_context(options.self_instruct), 2100),
        (translations(options.descriptions), 2000),
        (docstrings(rng), 900),
        (writing(), 10**6),
    ]
    prompts = []
    for kind, most in kinds:
        found = sorted(set(kind))
        rng.shuffle(found)
        prompts += found[:most]
    rng.shuffle(prompts)
    with options.output.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    print(f"{options.output}: {len(prompts)} prompts")


def spec_bench(checkout: Path) -> Iterator[str]:
    """First turns of the questions that are not held out."""
    for number, question in enumerate(_lines(checkout / "data/spec_bench/question.jsonl")):
        if number % HELD_OUT_EVERY:
            yield _cut(question["turns"][0])


def grade_school(checkout: Path) -> Iterator[str]:
    """Word problems of the data set's training part."""
    return (entry["question"] for entry in _lines(checkout / "grade_school_math/data/train.jsonl"))


def instructions(checkout: Path) -> Iterator[str]:
    """Instructions written by people, each with its first input."""
    for file in ("data/seed_tasks.jsonl", "human_eval/user_oriented_instructions.jsonl"):
        for entry in _lines(checkout / file):
            given = entry["instances"][0]["input"]
            yield _cut(f"{entry['instruction']}\n\n{given}".strip())


def summaries(checkout: Path) -> Iterator[str]:
    """News and dialogues to summarize."""
    pattern = r"cnn_dailymail_3_0_0_tldr|samsum_Summarize_|xsum_DOC_tldr|multi_news_sum"
    for number, text in enumerate(_p3(checkout, pattern)):
        body = re.sub(r"^.*?(Article: |Summarize: |Summarize this document: )", "", text, flags=re.DOTALL)
        yield _SUMMARIES[number % len(_SUMMARIES)].format(_cut(body.split("\n===")[0].strip()))


def questions(checkout: Path) -> Iterator[str]:
    """Questions without a text that answers them."""
    pattern = r"wiki_qa_Direct|sciq_Direct_Question_Closed|hotpotqa_straigh|commonsense_qa_answer_given"
    for text in _p3(checkout, pattern):
        yield re.sub(r"^(Q: |Answer this question: )|\s*A:\s*$", "", text).strip().replace("??", "?")


def with_context(checkout: Path) -> Iterator[str]:
    """Questions with a text that answers them."""
    pattern = r"adversarial_qa_\w+_question_context|quoref_(Given_Context|Answer_Question|Read_And)|ropes_prompt_beg"
    return (_cut(text) for text in _p3(checkout, pattern))


def translations(descriptions: Path) -> Iterator[str]:
    """German sentences to translate."""
    text = descriptions.read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        body = " ".join(line.strip() for line in block.splitlines() if line.startswith(" ") and line != " .")
        sentences = re.findall(r"[A-ZÄÖÜ][^.:]{50,220}\.", body)
        if sentences:
            yield f"Translate German to English: {sentences[0]}"


def docstrings(rng: random.Random) -> Iterator[str]:
    """Tasks about functions and classes of the standard library."""
    seen, found = set(), []
    for module in sorted(_MODULES.split()):
        for name, thing in inspect.getmembers(importlib.import_module(module), callable):
            text = inspect.getdoc(thing) or ""
            if not name.startswith("_") and 120 < len(text) < 900 and text.isascii() and text not in seen:
                seen.add(text)
                found.append((f"{module}.{name}", text))
    rng.shuffle(found)
    for number, (name, text) in enumerate(found):
        yield _cut(_DOCSTRINGS[number % len(_DOCSTRINGS)].format(name=name, text=text))


def writing() -> Iterator[str]:
    """Every form of writing task, about every topic."""
    return (form.format(topic) for form in _WRITING for topic in " ".join(_TOPICS.split()).split("; "))


def _p3(checkout: Path, pattern: str) -> Iterator[str]:
    """Prompts of the P3 templates whose names match."""
    matches: Callable[[str], Any] = re.compile(pattern).match
    for file in sorted((checkout / "data/finetuning/t0_train_50k/data_per_template").glob("*.jsonl")):
        if matches(file.stem):
            yield from (entry["prompt"].strip() for entry in _lines(file))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _cut(text: str) -> str:
    """Text cut to the maximum length of a quotation, at the end of a sentence."""
    words = list(re.finditer(r"\S+", text))
    if len(words) <= _WORDS:
        return text
    kept = text[: words[_WORDS].start()]
    return kept[: kept.rfind(". ") + 1] or kept.rstrip()


if __name__ == "__main__":
    main()
