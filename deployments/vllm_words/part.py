"""Hooks for vLLM's options. The tables are imported only when used, because commands import this module too."""

words_of_serve = "wingbeat.deployments.vllm_words.words:without_vllm"
speculative_settings = "wingbeat.deployments.vllm_words.speculative_config:settings_of"
hint = "wingbeat.deployments.vllm_words.foreign_names:hint"
