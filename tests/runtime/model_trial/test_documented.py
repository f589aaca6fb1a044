"""Figures of the trial that a document names."""

import pytest

from tests.test_docs import says
from wingbeat.runtime.model_trial import exact, reference, trial


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            "models.md",
            f"every row but the farthest may have a distance of at most {trial.FULL_PRECISION_TOLERANCE:.1%}. The "
            f"farthest row may have up to {trial.OUTLIER_FACTOR} x the sequence's median distance, and at most "
            f"{trial.LARGEST_TOLERANCE:.0%}. The median over the rows may be at most "
            f"{trial.FULL_PRECISION_TOLERANCE:.1%}.",
        ),
        ("models.md", f"where the copy takes at most {exact.WHOLE_COPY_BYTES >> 30} GiB"),
        (
            "models.md",
            f"distance may be at most {trial.ROUNDING_FACTOR} x the median distance of the rows that transformers "
            f"computes in the same dtype, plus {trial.ROUNDING_SLACK} of the spread",
        ),
        ("models.md", f"longer than windows of up to {reference.WIDEST_TRIED_WINDOW} tokens"),
    ],
    ids=str,
)
def test_what_a_document_says_of_the_trial_is_so(document: str, sentence: str) -> None:
    assert says(document, sentence)
