"""Verifiers on GPUs in deterministic mode; imports what computes them where one is asked for."""

rows_alike = {"cuda": "wingbeat.runtime.alike.model"}
lay_out_linears = "wingbeat.runtime.alike.linears:lay_out_linears"
join_packed = "wingbeat.runtime.alike.linears:join_packed"
