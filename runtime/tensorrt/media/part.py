"""Registers encoders of engine directories; the code that reads and builds encoders is imported on first use."""

extend_engine = "wingbeat.runtime.tensorrt.media.engine_encoder:extend_engine"
embedded_rows = "wingbeat.runtime.media.rows:embedded_rows"
encoder_of = "wingbeat.runtime.tensorrt.media.encoder_graph:encoder_of"
export_encoder = "wingbeat.runtime.tensorrt.media.encoder_graph:export_encoder"
encoder_profiles = "wingbeat.runtime.tensorrt.media.encoder_graph:encoder_profiles"
