"""Quantised checkpoints of a verifier, GGUF files among them; imports what reads them where there is one."""

check_quantiser = "wingbeat.runtime.quantised.checkpoints:check_quantiser"
load_quantised = "wingbeat.runtime.quantised.checkpoints:load_quantised"
folder_of = "wingbeat.runtime.quantised.gguf_folder:folder_of"
files_of = "wingbeat.runtime.quantised.gguf_folder:files_of"
stored_shapes = "wingbeat.runtime.quantised.gguf_weights:stored_shapes"
lent_tensors = "wingbeat.runtime.quantised.gguf_weights:lent_tensors"
