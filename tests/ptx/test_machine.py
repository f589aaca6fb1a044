"""The PTX machine: what instructions compute, and the faults it is there to find."""

import pytest
import torch

from tests.ptx.launch import spans
from tests.ptx.machine import Fault, Grid, Machine
from tests.ptx.program import Program
from tests.ptx.statements import PtxError

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 p0, .param .u64 p1)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<19>;
    .reg .b32 %r<39>;
    .reg .b64 %rd<19>;
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, {stride};
    add.s64 %rd4, %rd1, %rd3;
    mul.wide.u32 %rd5, %r1, {out_stride};
    add.s64 %rd6, %rd2, %rd5;
    shl.b32 %r2, %r1, 2;
    {body}
    ret;
}}"""


def run(body, source, out, *, threads=32, blocks=1, shared=4096, seed=0):
    """Execute the body in each thread; %rd4 and %rd6 are its elements of `source` and `out`, %r2 is 4 x its number."""
    strides = {"stride": source.element_size(), "out_stride": out.element_size()}
    machine = Machine(Program(HEAD.format(body=body, threads=threads, **strides)))
    grid = Grid((blocks, 1, 1), [source.data_ptr(), out.data_ptr()], list(spans([source, out])), shared, seed=seed)
    machine.launch(grid)
    return out


WORDS = torch.arange(256, dtype=torch.int32)


def empty(count=256, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)


REAL = torch.cat([torch.randn(997, generator=torch.Generator().manual_seed(0)) * 10.0**power for power in range(-9, 6)])
REAL = torch.cat([REAL, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 448.0, 464.0, 1e-45, 65504.0, 65520.0])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_to_halves_round_as_torch_does(dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    body = f"ld.global.b32 %r3, [%rd4]; cvt.rn.{name}.f32 %rs1, %r3; st.global.b16 [%rd6], %rs1;"
    for part in REAL.split(1024):
        source = part.contiguous()
        found = run(body, source, torch.zeros(len(source), dtype=dtype), threads=len(source))
        assert torch.equal(found, source.to(dtype))


def test_conversions_to_float8_are_the_nearest_and_saturate():
    body = "ld.global.b32 %r3, [%rd4]; cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, %r3; st.global.b16 [%rd6], %rs1;"
    source = REAL[:1024].clamp(-448, 448).contiguous()
    found = run(body, source, torch.zeros(1024, dtype=torch.int16), threads=1024).view(torch.float8_e4m3fn)
    assert torch.equal(found.view(-1, 2)[:, 0].float(), source.to(torch.float8_e4m3fn).float())
    beyond = run(body, torch.tensor([1e9, -500.0]), torch.zeros(2, dtype=torch.int16), threads=2)
    assert beyond.view(torch.float8_e4m3fn).float().tolist() == [448.0, 448.0, -448.0, -448.0]


def test_a_product_of_matrices_is_that_of_its_fragments():
    """m16n8k16, fragments by the PTX ISA's figures, every number a small integer: exact."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-4, 5, shape, generator=generator).bfloat16() for shape in ((16, 16), (16, 8)))
    lane = torch.arange(32)
    g, q = lane // 4, 2 * (lane % 4)
    parts = [a[g + 8 * (r % 2), q + 8 * (r // 2) + i] for r in range(4) for i in range(2)]
    parts += [b[q + 8 * r + i, g] for r in range(2) for i in range(2)]
    source = torch.stack(parts, 1).contiguous().view(torch.int32)  # [32, 6]
    loads = "".join(f"ld.global.b32 %r{3 + i}, [%rd7+{4 * i}];" for i in range(6))
    stores = "".join(f"st.global.b32 [%rd8+{4 * i}], %r{20 + i};" for i in range(4))
    body = f"""mad.wide.u32 %rd7, %r1, 24, %rd1; mad.wide.u32 %rd8, %r1, 16, %rd2; {loads} mov.b32 %r30, 0f3F800000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {{%r20, %r21, %r22, %r23}}, {{%r3, %r4, %r5, %r6}}, {{%r7, %r8}},
    {{%r30, %r30, %r30, %r30}}; {stores}"""
    found = run(body, source, torch.zeros(32, 4))
    expected = a.float() @ b.float() + 1
    for r in range(4):
        assert torch.equal(found[:, r], expected[g + 8 * (r // 2), q + r % 2])


def test_lanes_that_part_come_together_again():
    """The odd lanes loop; a shuffle behind the loop sees all."""
    body = """and.b32 %r3, %r1, 1; setp.eq.s32 %p1, %r3, 0; mov.b32 %r4, %r1; mov.b32 %r5, 0; @%p1 bra $done;
    $loop: add.s32 %r4, %r4, 100; add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 3; @%p2 bra $loop;
    $done: shfl.sync.bfly.b32 %r6, %r4, 1, 31, -1; st.global.b32 [%rd6], %r6;"""
    found = run(body, WORDS, empty(32)).tolist()
    assert found == [lane ^ 1 if lane % 2 else (lane ^ 1) + 300 for lane in range(32)]


EXCHANGE = """st.shared.b32 [%r2], %r1; {barrier} xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3];
st.global.b32 [%rd6], %r4;"""


def test_a_barrier_orders_warps():
    found = run(EXCHANGE.format(barrier="bar.sync 0;"), WORDS, empty(64), threads=64)
    assert found.tolist() == [lane ^ 32 for lane in range(64)]


@pytest.mark.parametrize("seed", range(4))
def test_without_a_barrier_it_is_a_race_in_any_order(seed):
    with pytest.raises(Fault, match=r"race in shared memory.*st\.shared|race in shared memory.*ld\.shared"):
        run(EXCHANGE.format(barrier=""), WORDS, empty(64), threads=64, seed=seed)


def test_blocks_that_write_and_read_the_same_are_a_race():
    body = "ld.global.b32 %r3, [%rd2]; add.s32 %r3, %r3, 1; st.global.b32 [%rd2], %r3;"
    with pytest.raises(Fault, match=r"race in global memory.*another block"):
        run(body, WORDS, empty(), threads=1, blocks=2)


def test_an_atomic_that_announces_orders_blocks():
    """The last of them to arrive reads what the first one wrote."""
    body = """mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd7, %r3, 4; add.s64 %rd8, %rd2, %rd7; st.global.b32 [%rd8+64], 7;
    atom.global.gpu.acq_rel.add.u32 %r4, [%rd2], 1; setp.eq.s32 %p1, %r4, 1;
    @%p1 ld.global.b32 %r5, [%rd2+64]; @%p1 ld.global.b32 %r6, [%rd2+68]; @%p1 add.s32 %r5, %r5, %r6;
    @%p1 st.global.b32 [%rd2+128], %r5;"""
    assert run(body, WORDS, empty(), threads=1, blocks=2)[32] == 14
    with pytest.raises(Fault, match="race"):
        run(body.replace("gpu.acq_rel", "gpu.relaxed"), WORDS, empty(), threads=1, blocks=2)


COPY = """and.b32 %r3, %r2, -16; cvt.u64.u32 %rd7, %r3; add.s64 %rd8, %rd1, %rd7; and.b32 %r4, %r1, 3;
setp.eq.s32 %p1, %r4, 0; @%p1 cp.async.cg.shared.global [%r3], [%rd8], 16; cp.async.commit_group; {wait}
bar.warp.sync -1; ld.shared.b32 %r5, [%r2]; st.global.b32 [%rd6], %r5;"""


def test_copies_are_there_once_they_are_waited_for():
    assert run(COPY.format(wait="cp.async.wait_group 0;"), WORDS, empty(32)).tolist() == list(range(32))


def test_copies_need_not_be_there_before():
    """They land early or late by chance, and both are seen within a few seeds."""
    found = [run(COPY.format(wait=""), WORDS, empty(32), seed=seed).tolist() == list(range(32)) for seed in range(12)]
    assert any(found)
    assert not all(found)


SELECTED = (
    "mov.b32 %r3, p0; mov.b32 %r4, p1; setp.lt.u32 %p1, %r1, 7; selp.b32 %r5, %r3, %r4, %p1; ld.param.b64 %rd7, [%r5];"
)


def test_a_parameter_is_loaded_from_the_address_that_was_selected():
    out = run(
        f"{SELECTED} sub.s64 %rd8, %rd7, %rd2; setp.ne.s64 %p2, %rd8, 0; selp.b32 %r6, 1, 0, %p2;"
        "st.global.b32 [%rd6], %r6;",
        WORDS,
        empty(32),
    )
    assert out.tolist() == [1] * 7 + [0] * 25
    with pytest.raises(PtxError, match="%r5 is the address of a parameter"):
        run(f"{SELECTED} add.s32 %r6, %r5, 1;", WORDS, empty(32))


FAULTS = {
    "outside of every tensor": "ld.global.b32 %r3, [%rd4+4096];",
    "misaligned global": "ld.global.b64 %rd7, [%rd4+2];",
    "shared access of 4 bytes at 8192 of 4096": "mov.b32 %r3, 8192; ld.shared.b32 %r4, [%r3];",
    "a part of a warp": "setp.eq.s32 %p1, %r1, 3; @%p1 bra $skip; bar.sync 0; $skip: mov.b32 %r3, 0;",
    "does not end": "$loop: bra.uni $loop;",
    "lane that does not take part": "setp.eq.s32 %p1, %r1, 3; @%p1 ret; shfl.sync.idx.b32 %r3, %r1, 3, 31, -9;",
    "trap": "trap;",
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_named_with_their_instruction(what, monkeypatch):
    monkeypatch.setattr("tests.ptx.machine.MOST_STEPS", 10_000)
    with pytest.raises(Fault, match=rf"{what}.*kernel, block 0, warp 0, instruction \d+"):
        run(FAULTS[what], WORDS, empty(32))


UNKNOWN = ["max.f32 %r3, %r1, %r1, %r1, %r1", "add.rz.f32 %r3, %r1, %r1", "tcgen05.ld %r3", "bar.sync 1, 64"]


@pytest.mark.parametrize("text", UNKNOWN)
def test_instructions_that_are_not_known_are_refused_by_name(text):
    with pytest.raises(PtxError, match=text.split()[0].split(".")[0]):
        run(f"{text};", WORDS, empty())
