"""The kernels of GPUs; imports Triton where one is asked for."""

replace_wrong = "wingbeat.kernels.gpu.comparison:replace_wrong"
kernels = {
    "attention": "wingbeat.kernels.gpu.attention.launch",
    **dict.fromkeys(("store_kv", "move_kv"), "wingbeat.kernels.gpu.kv"),
    **dict.fromkeys(("add_rms_norm", "rotate_and_store", "silu_mul"), "wingbeat.kernels.gpu.layer"),
    "fp8_linear": "wingbeat.kernels.gpu.fp8",
    **dict.fromkeys(("ancestors", "path_token_ids", "walk_tree"), "wingbeat.kernels.gpu.tree.walk"),
    "forced_walk": "wingbeat.kernels.gpu.tree.forced",
    "grow_tree": "wingbeat.kernels.gpu.tree.table",
    "top_candidates": "wingbeat.kernels.gpu.tree.candidates",
    "noise": "wingbeat.kernels.gpu.sampling.noise",
    "choose_tokens": "wingbeat.kernels.gpu.sampling.launch",
    "count_tokens": "wingbeat.kernels.gpu.sampling.history",
}
