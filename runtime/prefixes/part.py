"""Runtime part: taps of saved prefixes; imports the implementation with the first engine."""

recorded_contexts = "wingbeat.runtime.prefixes.recorded_contexts:RecordedContexts"
