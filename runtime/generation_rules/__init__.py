"""Rules of a model's generation_config.json that apply to every request."""
