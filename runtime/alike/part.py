"""Runtime part: deterministic mode on GPUs; imports the implementation only if the mode is requested."""

rows_alike = {"cuda": "wingbeat.runtime.alike.model"}
lay_out_linears = "wingbeat.runtime.alike.linears:lay_out_linears"
join_packed = "wingbeat.runtime.alike.linears:join_packed"
