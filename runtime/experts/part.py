"""Runtime part: mixtures of experts that CUDA graphs can capture; imported when a model is loaded."""

choose_experts = "wingbeat.runtime.experts.forward:choose_experts"
