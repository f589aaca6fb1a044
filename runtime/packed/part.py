"""Runtime part for quantised weights that stay packed on GPUs; imports the implementation only if it is used."""

pack_weight = "wingbeat.runtime.packed.modules:pack_weight"
keep_packed = "wingbeat.runtime.packed.modules:keep_packed"
lay_out_linears = "wingbeat.runtime.packed.modules:lay_out_linears"
join_packed = "wingbeat.runtime.packed.modules:join_packed"
pack_experts = "wingbeat.runtime.packed.modules:pack_experts"
