"""The CUDA branches in numbers: a GPU whose memory is the host's, each file of cases in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import compiler
from tests.needs import needs
from tests.runtime.hybrids import needs_states

pytest.importorskip("triton")
if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)


def run(*options: str, **environment: str) -> None:
    """All cases must pass, and none be skipped."""
    given = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", "", *options]
    folder, given = Path(__file__).parent, given | environment
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


DEAR = "logits_of_half_precision or work_of_the_host"
"""Cases of the device that run models, or every operation that ends a capture."""


@pytest.mark.slow
def test_the_device():
    run("device_cases.py", "-k", f"not ({DEAR})")


@pytest.mark.slow
def test_the_dear_cases_of_the_device():
    run("device_cases.py", "-k", DEAR)


@pytest.mark.slow
def test_small_rounds_on_it():
    run("engine_cases.py")


@needs("one_graph")
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rounds_in_one_graph(shape):
    run("one_graph_cases.py", "-k", shape)


@needs("packed_on_gpus")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "fp8", "awq", "experts", "mxfp4"])
def test_captured_rounds_of_packed_weights(kind):
    run("packed_cases.py", "-k", kind, "--ptx", "90")


@needs("rollouts")
@pytest.mark.slow
def test_captured_rounds_over_written_weights():
    run("rollout_cases.py", "--ptx", "90")


@needs_states
@pytest.mark.slow
def test_captured_gated_delta_nets():
    run("hybrid_cases.py", "-k", "qwen3_5")


@needs_states
@pytest.mark.slow
def test_captured_short_convolutions_and_mamba_2():
    run("hybrid_cases.py", "-k", "not qwen3_5")


@needs("experts")
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_captured_mixtures_of_experts(capability):
    run("expert_cases.py", "--ptx", capability)


@needs("latent_attention")
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_captured_attention_over_latents(capability):
    run("latent_cases.py", "--ptx", capability)


@needs("kv_windows")
@pytest.mark.slow
def test_windows_alone():
    run("window_cases.py", "--ptx", "90")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "120"])
def test_captured_trees_by_own_products(capability):
    run("drafter_cases.py", "-k", "eagle-own", "--ptx", capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_device_and_small_rounds_of_compiled_kernels(capability):
    run("device_cases.py", "engine_cases.py", "--ptx", capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *(
            "eagle and not fp8 and not own",
            "eagle-fp8",
            "draft-model",
            "foreign-vocabulary",
            "mtp",
            "shared_keys",
            "p-eagle",
        ),
        *("dflash", "dspark-rnn"),
    ],
)
def test_captured_trees_of_every_kind_of_drafter(kind):
    run("drafter_cases.py", "-k", kind)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree", "adaptive"])
def test_the_demo_pair_from_its_load_to_its_tokens(shape):
    """As compiled for sm_90: interpreted, its 24 layers take an hour."""
    run("pair_cases.py", "--ptx", "90", "-k", shape)


@needs("lora")
@pytest.mark.slow
def test_the_demo_pair_with_an_adapter():
    run("adapter_cases.py", "--ptx", "90")


@pytest.mark.slow
def test_the_demo_pair_in_bfloat16():
    run(
        "pair_cases.py",
        "--ptx",
        "90",
        "-k",
        "tree and (start or (drafted and (greedy or top-p)))",
        PAIR_DTYPE="bfloat16",
    )
