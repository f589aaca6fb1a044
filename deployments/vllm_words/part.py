"""Hooks for vLLM's options. Commands import this module too, so that the tables are imported only when used."""

words_of_serve = "wingbeat.deployments.vllm_words.words:without_vllm"
speculative_settings = "wingbeat.deployments.vllm_words.speculative_config:settings_of"
hint = "wingbeat.deployments.vllm_words.foreign_names:hint"
