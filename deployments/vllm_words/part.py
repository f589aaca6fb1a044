"""Options of vLLM; imported by commands too, so that what reads them is imported when it is first asked for."""

words_of_serve = "wingbeat.deployments.vllm_words.words:without_vllm"
speculative_settings = "wingbeat.deployments.vllm_words.speculative_config:settings_of"
hint = "wingbeat.deployments.vllm_words.foreign_names:hint"
