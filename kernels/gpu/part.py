"""Hooks of the GPU kernels. Triton is imported when a kernel is first requested."""

replace_wrong = "wingbeat.kernels.gpu.comparison:replace_wrong"
kernels = {
    "attention": "wingbeat.kernels.gpu.attention.launch",
    **dict.fromkeys(("store_kv", "move_kv", "slot_mapping"), "wingbeat.kernels.gpu.kv"),
    **dict.fromkeys(
        ("add_rms_norm", "rotations", "rotate_and_store", "silu_mul", "gated_norm"), "wingbeat.kernels.gpu.layer"
    ),
    "few_rows_product": "wingbeat.kernels.gpu.products",
    "embed_to_heads": "wingbeat.kernels.gpu.embedded",
    **dict.fromkeys(("ancestors", "path_token_ids", "walk_tree"), "wingbeat.kernels.gpu.tree.walk"),
    **dict.fromkeys(("check_trees", "place_nodes", "settle_paths"), "wingbeat.kernels.gpu.round"),
    "grow_tree": "wingbeat.kernels.gpu.tree.table",
    "top_candidates": "wingbeat.kernels.gpu.tree.candidates",
    "noise": "wingbeat.kernels.gpu.sampling.noise",
    "choose_tokens": "wingbeat.kernels.gpu.sampling.launch",
    "count_tokens": "wingbeat.kernels.gpu.sampling.history",
}
