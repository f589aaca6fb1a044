"""Runtime part: rounds of requests with `trace`; imports the implementation with the first engine."""

shown_rounds = "wingbeat.runtime.shown_rounds.shown_rounds:ShownRounds"
