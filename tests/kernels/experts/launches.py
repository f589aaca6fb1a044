"""Launches of the steps of mixtures of experts, for `compile_launches`."""

import torch

from wingbeat.kernels.experts import triton as triton_experts
from wingbeat.kernels.experts.product import Gate, Routes, Shared
from wingbeat.kernels.experts.router import Rule


def launch_all() -> None:
    groups = Rule(8, True, num_groups=8, kept_groups=4, group_best=2)
    rules = ((1, 128, Rule(8, num_shared=1)), (60, 32, Rule(4, True, False)), (1, 256, groups))
    for num_rows, num_experts, rule in rules:
        logits = torch.zeros(num_rows, num_experts, dtype=torch.bfloat16)
        weights, chosen = triton_experts.choose(
            logits, logits[0].float() if rule.sigmoid else None, rule, logits[:, :1]
        )
        triton_experts.routes(chosen.flatten(), num_experts, num_experts, 16)
        triton_experts.sum_choices(logits.new_zeros(chosen.numel(), 4096), weights)
    for num_rows, inputs, columns in ((60, 4096, 14336), (1, 2880, 9728)):
        rows, experts = (torch.zeros(*size, inputs, dtype=torch.bfloat16) for size in ((num_rows,), (8, columns)))
        chosen = torch.zeros(num_rows, 4, dtype=torch.int64)
        gated, down = (
            torch.zeros(*size, dtype=torch.bfloat16) for size in ((8, 2 * columns, inputs), (8, inputs, columns))
        )
        routes, made = Routes.of(chosen, 9), rows.new_zeros(4 * num_rows, columns)
        triton_experts.grouped_product(rows, gated, None, made, routes, Gate(), Shared(1, tuple(gated[0].chunk(2))))
        each = rows.new_zeros(4 * num_rows, inputs)
        triton_experts.grouped_product(made, down, None, each, routes, None, Shared(1, (down[0],)))
        for gate in (None, Gate(), Gate(True, 1.702, 7.0, 1.0)):
            for weight, bias in ((experts, None), (rows.new_zeros(8, inputs, columns).mT, experts[:, :, 0])):
                out = rows.new_zeros(4 * num_rows, columns if gate is None else columns // 2)
                triton_experts.grouped_product(rows, weight, bias, out, Routes.of(chosen, 8), gate)
