"""Memory for loading models whose weights stay packed: random files of each format, loaded one by one.

    .venv/bin/python benchmarks/packed_memory.py [--gigabytes 2] [--forms Q4_0 Q8_0 Q4_K awq fp8] [--output FILE]

Each model is loaded in a process of its own. Reports the bytes of its weights, the process's peak memory while loading
(VmHWM), and both relative to the file size.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from report import Report, Table, machine_facts
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, VOCAB, GROUP = 2048, 8192, 16, 256, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
BITS = {
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q4_K": 4.5,
    "Q5_K": 5.5,
    "Q6_K": 6.5625,
    "awq": 4.16,
    "fp8": 8,
}
SCALES_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QUANTISATION = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
}
LOADED = """
import json, re, sys, time, torch
from pathlib import Path
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.verifier.layers.linears import held_bytes
from wingbeat.runtime.verifier.loading.loader import load_model
status = lambda name: int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
began, before = time.perf_counter(), status("VmRSS")
loaded = load_model(checkpoint_folder(sys.argv[1]), torch.float32, torch.device("cpu"))
print(json.dumps([held_bytes(loaded.model), before, status("VmHWM"), time.perf_counter() - began]))
"""


def write_gguf(file: Path, form: str, num_layers: int) -> None:
    """Writes a random Llama whose matrices have one GGUF format."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    kind, chance = GGMLQuantizationType[form], np.random.default_rng(0)
    block, size = GGML_QUANT_SIZES[kind]
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, VOCAB))])
    writer.add_token_merges(["a b"])
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tables = {name: np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)) for name in ("token_embd", "output")}
    for name, table in tables.items():
        writer.add_tensor(f"{name}.weight", (0.1 * table).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    shared = {}
    for shape in set(SHAPES.values()):
        blocks = chance.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        for begin in SCALES_AT[form]:
            scales = chance.uniform(0.5, 1, blocks.shape[:2]).astype(np.float16) / np.float16(2**12)
            blocks[:, :, begin : begin + 2] = scales[:, :, None].view(np.uint8)
        shared[shape] = blocks.reshape(shape[0], -1)
    for layer in range(num_layers):
        for name, shape in zip(names, SHAPES.values(), strict=True):
            writer.add_tensor(f"blk.{layer}.{name}.weight", shared[shape], raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(folder: Path, form: str, num_layers: int) -> None:
    """Writes a random Llama as a Hugging Face checkpoint."""
    folder.mkdir()
    chance = torch.Generator().manual_seed(0)
    fields = CONFIG | {"num_hidden_layers": num_layers, "dtype": "float32", "quantization_config": QUANTISATION[form]}
    (folder / "config.json").write_text(json.dumps(fields))
    index = {}

    def save(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05}-of-{num_layers + 1:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for layer in range(num_layers):
        tensors = {
            f"model.layers.{layer}.{name}.weight": torch.ones(HIDDEN)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, (outputs, inputs) in SHAPES.items():
            parts = f"model.layers.{layer}.{name}"
            if form == "awq":
                whole = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), generator=chance).int()
                tensors[f"{parts}.qweight"] = whole
                tensors[f"{parts}.qzeros"] = whole[: inputs // GROUP].clone()
                tensors[f"{parts}.scales"] = torch.rand(inputs // GROUP, outputs, generator=chance).half() / 2**11
            else:
                rounded = torch.randn(outputs, inputs, generator=chance).to(torch.float8_e4m3fn)
                tensors[f"{parts}.weight"] = rounded
                tensors[f"{parts}.weight_scale_inv"] = torch.full((outputs // GROUP, inputs // GROUP), 0.02)
        save(layer, tensors)
    tables = {f"{name}.weight": 0.1 * torch.randn(VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    save(num_layers, tables | {"model.norm.weight": torch.ones(HIDDEN)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    """Measures the selected formats, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of each file in GB")
    parser.add_argument("--forms", nargs="+", choices=BITS, default=["Q4_0", "Q8_0", "Q4_K", "awq", "fp8"])
    parser.add_argument("--quick", action="store_true", help="write no file")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    rows, figures = [], {}
    for form in args.forms:
        numbers = sum(outputs * inputs for outputs, inputs in SHAPES.values())
        num_layers = max(1, round(args.gigabytes * 8e9 / (numbers * BITS[form])))
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / ("model" if form in QUANTISATION else "model.gguf")
            (write_folder if form in QUANTISATION else write_gguf)(model, form, num_layers)
            files = [model] if model.is_file() else list(model.iterdir())
            size = sum(file.stat().st_size for file in files)
            child = subprocess.run(
                [sys.executable, "-c", LOADED, str(model)], stdout=subprocess.PIPE, text=True, check=True
            )
        held, before, peak, seconds = json.loads(child.stdout.splitlines()[-1])
        figures[form] = {"file": size, "weights": held, "before": before, "peak": peak, "seconds": seconds}
        rows.append((form, *(f"{one / 1e9:.2f}" for one in (size, held, before, peak)), f"{seconds:.0f}"))
    columns = ("form", "file, GB", "weights, GB", "process before, GB", "at most, GB", "s")
    report = Report("packed_memory", machine_facts(), [Table("Models that are loaded", columns, rows)], figures)
    report.finish(args, "packed_memory")


if __name__ == "__main__":
    main()
