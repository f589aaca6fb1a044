"""Setting and metrics of suffix drafts beside a drafter."""
