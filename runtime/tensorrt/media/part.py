"""Images of engine directories; what reads and builds their encoders is imported when it is first asked for."""

extend_engine = "wingbeat.runtime.tensorrt.media.visual_encoder:extend_engine"
embedded_rows = "wingbeat.runtime.media.rows:embedded_rows"
visual_of = "wingbeat.runtime.tensorrt.media.visual_graph:visual_of"
export_visual = "wingbeat.runtime.tensorrt.media.visual_graph:export_visual"
visual_profiles = "wingbeat.runtime.tensorrt.media.visual_graph:visual_profiles"
