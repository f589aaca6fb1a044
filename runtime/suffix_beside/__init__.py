"""Trees that continue earlier text, made in the engine's process beside a drafter's."""
