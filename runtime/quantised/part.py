"""Quantised checkpoints and heads, GGUF files among them; imports their readers where there is such a file."""

check_quantiser = "wingbeat.runtime.quantised.checkpoints:check_quantiser"
load_quantised = "wingbeat.runtime.quantised.checkpoints:load_quantised"
quantised_head = "wingbeat.runtime.quantised.heads:QuantisedHead"
folder_of = "wingbeat.runtime.quantised.gguf_folder:folder_of"
files_of = "wingbeat.runtime.quantised.gguf_folder:files_of"
stored_shapes = "wingbeat.runtime.quantised.gguf_weights:stored_shapes"
lent_tensors = "wingbeat.runtime.quantised.gguf_weights:lent_tensors"
