"""Images of engine directories; what reads them and what builds their encoders is imported where it is called."""

extend_engine = "wingbeat.runtime.tensorrt.media.visual_encoder:extend_engine"
embedded_rows = "wingbeat.runtime.media.rows:embedded_rows"
visual_of = "wingbeat.runtime.tensorrt.media.visual_graph:visual_of"
export_visual = "wingbeat.runtime.tensorrt.media.visual_graph:export_visual"
visual_profiles = "wingbeat.runtime.tensorrt.media.visual_graph:visual_profiles"
