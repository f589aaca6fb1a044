"""Trees that continue earlier text (text trees), built in the engine's process in addition to a drafter's trees."""
