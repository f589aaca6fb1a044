"""Runtime part: fused decoder layers, norms and rotations; imports the implementation when a model is loaded."""

fuse_layers = "wingbeat.runtime.fused.layers:fuse_layers"
fuse_head = "wingbeat.runtime.fused.levels:fuse_head"
