"""Registers the refusal of heads of other families, where an EAGLE head is expected."""

other_family = "wingbeat.runtime.head_families.refused:other_family"
