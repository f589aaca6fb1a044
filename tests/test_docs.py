"""Figures of the documents that are constants of the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import LEAST_MODEL_LEN, NUM_SEQS, PROMPT_TOKENS, SpeculationConfig
from wingbeat.runtime.engine.memory import LEAST_PROMPT_TOKENS
from wingbeat.runtime.verifier.loading import exact, reference, trial

DOCS = Path(__file__).parents[1] / "docs"


def text_of(document: str) -> str:
    """A document without its line ends."""
    return " ".join((DOCS / document).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            "models.md",
            f"relative to the spread of the row's logits, is {trial.FULL_PRECISION_TOLERANCE:.1%} in the median and "
            f"for any row, or for one row {trial.OUTLIER_FACTOR} x the text's median, at most "
            f"{trial.LARGEST_TOLERANCE:.0%};",
        ),
        ("models.md", f"where the copy takes at most {exact.WHOLE_COPY_BYTES >> 30} GiB"),
        (
            "models.md",
            f"they may be {trial.ROUNDING_FACTOR} x as far from it, and {trial.ROUNDING_SLACK} of the spread, as",
        ),
        ("models.md", f"longer than windows of up to {reference.WIDEST_TRIED_WINDOW} tokens"),
        ("operations.md", f"a pool below {LEAST_MODEL_LEN} tokens ends the start"),
    ],
    ids=str,
)
def test_what_a_document_says_of_a_limit_is_the_limit(document: str, sentence: str) -> None:
    assert re.sub(r"(\d)%", r"\1 %", sentence) in text_of(document)


def settings() -> dict[str, tuple[str, ...]]:
    """By settings of one row of docs/operations.md: their defaults there, as many as the settings where that is so."""
    _, found, after = (DOCS / "operations.md").read_text().partition("| setting | default |")
    assert found not in after
    assert found
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*) \|", after.partition("\n\n")[0], re.M)
    return {names.replace("`", ""): tuple(default.replace("`", "").split(", ")) for names, default in rows}


def written(value: Any) -> str:
    """A default as the table has it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_of_settings_has_their_defaults() -> None:
    """Where the table gives a number, a flag or nothing; what it tells in words is not compared."""
    wrong, compared = {}, 0
    for names, defaults in settings().items():
        fields = names.split(", ")
        if len(fields) != len(defaults) or not all(name in AppConfig.model_fields for name in fields):
            continue
        for name, told in zip(fields, defaults, strict=True):
            default = AppConfig.model_fields[name].get_default(call_default_factory=False)
            if (default is None and told != "none") or not re.fullmatch(r"[\d.]+|true|false|none|auto|torch", told):
                continue
            compared += 1
            if told != written(default):
                wrong[name] = (told, written(default))
    assert not wrong
    assert compared > 35, compared


def test_the_table_of_settings_names_every_setting_and_no_other() -> None:
    told = {name for names in settings() for name in names.split(", ")}
    print(f"{len(AppConfig.model_fields)} settings")
    assert not sorted(AppConfig.model_fields.keys() - told)


def test_defaults_by_device_are_told() -> None:
    cpu, gpu = (SpeculationConfig.default(device) for device in ("cpu", "cuda"))
    shapes = [f"{one.draft_steps}, {one.draft_top_k}, {one.verify_tree_size}" for one in (cpu, gpu)]
    table = settings()
    assert ", ".join(table["draft_steps, draft_top_k, verify_tree_size"]) == f"{shapes[0]} on CPUs; {shapes[1]} on GPUs"
    num_seqs = f"{NUM_SEQS['cpu']} on CPUs, on GPUs as many of {NUM_SEQS['cuda']} as the memory holds"
    assert f"| `max_num_seqs` | {num_seqs} |" in text_of("operations.md")
    told = ", ".join(table["max_num_batched_tokens"])
    usual, least = PROMPT_TOKENS["cuda"], LEAST_PROMPT_TOKENS
    lowered = f"there {usual // 2} or {least} where [memory](#memory) is short"
    assert (usual // 4, told) == (least, f"{PROMPT_TOKENS['cpu']} on CPUs, {usual} on GPUs, {lowered}")


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading_that_is_there() -> None:
    root, dead, num_links = DOCS.parent, [], 0
    for document in (*DOCS.glob("**/*.md"), root / "README.md", root / "benchmarks" / "README.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            num_links += 1
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
                dead.append(f"{document.relative_to(root)}: {target}")
    assert not dead
    assert num_links > 100
