"""Trees that continue earlier text, built in the engine's process in addition to a drafter's trees."""
