"""Registers the rounding of an EAGLE head's weights to FP8."""

fp8_head = "wingbeat.runtime.fp8_heads.fp8_weights:use_fp8"
