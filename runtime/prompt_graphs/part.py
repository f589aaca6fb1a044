"""Runtime part: rounds with prompt chunks are captured, too; imported with the first engine that captures rounds."""

prompt_shapes = "wingbeat.runtime.prompt_graphs.prompt_shapes:prompt_shapes"
prompt_graphs = "wingbeat.runtime.prompt_graphs.prompt_rounds:PromptGraphs"
