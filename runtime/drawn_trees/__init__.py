"""Draft trees whose shape a user has drawn."""
