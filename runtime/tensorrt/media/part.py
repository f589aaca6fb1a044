"""Registers images for engine directories; the code that reads and builds encoders is imported on first use."""

extend_engine = "wingbeat.runtime.tensorrt.media.visual_encoder:extend_engine"
embedded_rows = "wingbeat.runtime.media.rows:embedded_rows"
visual_of = "wingbeat.runtime.tensorrt.media.visual_graph:visual_of"
export_visual = "wingbeat.runtime.tensorrt.media.visual_graph:export_visual"
visual_profiles = "wingbeat.runtime.tensorrt.media.visual_graph:visual_profiles"
