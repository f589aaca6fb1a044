"""Questions of a dataset, with their categories and turns. This module does not depend on engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, ValidationError, field_validator

from wingbeat.deployments.cli.options import UserError

SPECBENCH = "specbench"
_SPECBENCH_FILE = Path(__file__).parent / "data" / "spec_bench_held_out.jsonl"
Item = TypeVar("Item")


class Question(BaseModel):
    """The user's turns of a conversation, read from one line of a file in Spec-Bench's form; a line may instead have
    the field `prompt`, which is a single turn.
    """

    category: str = "none"
    turns: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, validation_alias=AliasChoices("turns", "prompt")
    )

    @field_validator("turns", mode="before")
    @classmethod
    def _of_prompt(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def read_questions(dataset: str, most: int | None) -> list[Question]:
    """Return the questions of a dataset: all of them, or `most` questions evenly spread over the file if there are
    more.

    Args:
        dataset: SPECBENCH, or the path of a JSONL file.

    Raises:
        UserError: the file cannot be read, or a line holds no question.
    """
    path = _SPECBENCH_FILE if dataset == SPECBENCH else Path(dataset)
    questions: list[Question] = []
    try:
        for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
            questions.append(Question.model_validate_json(line))
    except ValidationError as error:
        problem = f"question {len(questions) + 1}: {error.errors()[0]['msg']}"
        raise UserError(f"--dataset {dataset}: {problem}; lines hold 'turns', a list of texts, or 'prompt'") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--dataset {dataset}: {error}") from error
    if not questions:
        raise UserError(f"--dataset {dataset}: the file holds no question")
    return evenly(questions, most)


def evenly(items: Sequence[Item], most: int | None) -> list[Item]:
    """Return all items, or `most` evenly spread items if there are more."""
    count = min(most or len(items), len(items))
    return [items[index * len(items) // count] for index in range(count)]
