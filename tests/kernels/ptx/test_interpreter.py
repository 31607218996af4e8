"""The PTX interpreter on hand-written PTX: it computes as PTX says, and refuses what no GPU promises."""

import numpy as np
import pytest
from ptx import Buffer, Fault, execute

THREADS = 64


def kernel(body: str, pointers: int = 2) -> str:
    """A kernel of up to two pointers, %rd1 and %rd2, each moved to the thread's own 4 bytes in %rd3, %rd4."""
    parameters = ",\n".join(f".param .u64 .ptr .global .align 1 k_param_{at}" for at in range(pointers))
    loads = "\n".join(f"ld.param.b64 %rd{at + 1}, [k_param_{at}];" for at in range(pointers))
    own = "\n".join(f"mad.wide.u32 %rd{at + 3}, %r1, 4, %rd{at + 1};" for at in range(pointers))
    return f""".visible .entry k(
{parameters}
)
{{
\t.reg .b32 %r<9>;
{loads}
\tmov.u32 %r1, %tid.x;
{own}
{body}
\tret;
$L__func_end0:
}}"""


def run(
    body: str,
    given: np.ndarray,
    *,
    programs: int = 1,
    threads: int = THREADS,
    unwritten: np.ndarray | None = None,
    unfinished: np.ndarray | None = None,
    early: bool = False,
) -> np.ndarray:
    """What the kernel leaves at %rd2, of as many words as are given at %rd1."""
    first = Buffer(given.view(np.uint8).copy(), unwritten, unfinished)
    second = Buffer(np.zeros(given.nbytes, np.uint8))
    arguments = [(first, 0), (second, 0)]
    execute(kernel(body), (programs,), arguments, threads=threads, shared=1024, early=early)
    return second.data.view(given.dtype)


NUMBERS = np.arange(THREADS, dtype=np.int32) * 48271 - 99999
LANES = np.arange(THREADS)
FLOATS = np.linspace(-3, 3, THREADS, dtype=np.float32)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r3, %r2, 7;", NUMBERS + 7),
        ("shr.s32 %r3, %r2, 40;", NUMBERS >> 31),
        ("shr.u32 %r3, %r2, 33;", NUMBERS * 0),
        ("bfe.u32 %r3, %r2, 4, 14;", NUMBERS >> 4 & 0x3FFF),
        ("bfe.s32 %r3, %r2, 2, 1;", -(NUMBERS >> 2 & 1)),
        ("prmt.b32 %r3, %r2, 0, 0x0123;", NUMBERS.byteswap()),
        ("mul.hi.s32 %r3, %r2, %r2;", (NUMBERS.astype(np.int64) ** 2 >> 32).astype(np.int32)),
        ("div.s32 %r3, %r2, 1000;", np.trunc(NUMBERS / 1000).astype(np.int32)),
        ("popc.b32 %r3, %r2;", np.bitwise_count(NUMBERS.view(np.uint32)).astype(np.int32)),
        ("setp.lt.s32 %p1, %r2, 0; selp.b32 %r3, 1, 2, %p1;", np.where(NUMBERS < 0, 1, 2).astype(np.int32)),
        (
            "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};",
            NUMBERS.view(np.uint16).reshape(-1, 2)[:, ::-1].copy(),
        ),
        ("shfl.sync.bfly.b32 %r3, %r2, 3, 31, -1;", NUMBERS[LANES ^ 3]),
        ("shfl.sync.up.b32 %r3, %r2, 1, 0, -1;", NUMBERS[LANES - (LANES % 32 > 0)]),
        ("redux.sync.max.s32 %r3, %r2, -1;", np.repeat([NUMBERS[31], NUMBERS[63]], 32)),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_an_instruction_on_integers_computes_what_ptx_says(instruction: str, expected: np.ndarray) -> None:
    found = run(f"ld.global.b32 %r2, [%rd3]; {instruction} st.global.b32 [%rd4], %r3;", NUMBERS)
    assert found.tolist() == expected.view(np.int32).ravel().tolist()


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("fma.rn.f32 %r3, %r2, %r2, 0f3F800000;", FLOATS * FLOATS + 1),
        ("ex2.approx.ftz.f32 %r3, %r2;", np.exp2(FLOATS)),
        ("max.f32 %r3, %r2, 0f7FC00000;", FLOATS),
        ("min.xorsign.abs.f32 %r3, %r2, 0f3F800000;", np.clip(FLOATS, -1, 1)),
        ("cvt.rzi.s32.f32 %r4, %r2; cvt.rn.f32.s32 %r3, %r4;", np.trunc(FLOATS)),
        (
            "mul.f32 %r4, %r2, 0f501502F9; cvt.rzi.s32.f32 %r5, %r4; cvt.rn.f32.s32 %r3, %r5;",
            np.clip(FLOATS * 1e10, -(2**31), 2**31),
        ),
        ("cvt.rzi.s32.f32 %r4, 0f7FC00000; cvt.rn.f32.s32 %r3, %r4;", FLOATS * 0),
        ("add.f32 %r4, %r2, 0fC2FE0000; ex2.approx.ftz.f32 %r3, %r4;", np.exp2(FLOATS - 127) * (FLOATS >= 1)),
        ("cvt.rn.bf16x2.f32 %r4, %r2, 0f00000000; and.b32 %r3, %r4, 0xFFFF0000;", FLOATS),
        # A sum of bfloat16 on Ampere, as Triton 3.9 writes it: times one, plus the other.
        (
            "mov.b16 %rs3, 0x3F80; cvt.rn.bf16.f32 %rs1, %r2;"
            "fma.rn.bf16 %rs2, %rs1, %rs3, %rs1; cvt.f32.bf16 %r3, %rs2;",
            2 * FLOATS,
        ),
        ("cvt.rn.bf16.f32 %rs1, %r2; neg.bf16 %rs2, %rs1; cvt.f32.bf16 %r3, %rs2;", -FLOATS),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_an_instruction_on_floats_computes_what_ptx_says(instruction: str, expected: np.ndarray) -> None:
    found = run(f"ld.global.b32 %r2, [%rd3]; {instruction} st.global.b32 [%rd4], %r3;", FLOATS)
    np.testing.assert_allclose(found, expected, rtol=2**-8 if "bf16" in instruction else 1e-6)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rz.f32 %r3, %r2, %r2;",
        "add.sat.s32 %r3, %r2, %r2;",
        "mad.hi.s32 %r3, %r2, %r2, %r2;",
        "fma.rn.ftz.f32 %r3, %r2, %r2, %r2;",
        "max.NaN.bf16x2 %r3, %r2, %r2;",
        "neg.bf16x2 %r3, %r2;",
        "cvt.rz.bf16x2.f32 %r3, %r2, %r2;",
        "cvt.rn.relu.bf16x2.f32 %r3, %r2, %r2;",
        "setp.lt.ftz.f32 %p1, %r2, %r2;",
        "setp.lt.s32 %p1|%p2, %r2, %r2;",
        "mov.u32 %r3, %ntid.x;",
        "mov.u32 %r3, %tid.y;",
        "ld.global.nc.b32 %r3, [%rd3];",
        "ld.acquire.gpu.global.b32 %r3, [%rd3];",
        "st.shared::cluster.b32 [%r3], %r2;",
        "cp.async.ca.shared.global.L2::cache_hint [%r5], [%rd3], 4, %rd5;",
        "shfl.sync.bfly.b32 %r3, %r2, 3, 15, -1;",
        "shfl.sync.bfly.b32 %r3, %r2, 3, 31, 0xffff;",
        "shfl.sync.up.b32 %r3|%p1, %r2, 3, 0, -1;",
        "redux.sync.add.s32 %r3, %r2, 0xffff;",
        "bar.sync 1;",
        "bar.sync 0, 32;",
        "bar.warp.sync 1;",
        "fence.acq_rel.gpu;",
        "griddepcontrol.hold;",
    ],
)
def test_a_modifier_or_an_operand_that_would_be_passed_over_is_refused(instruction: str) -> None:
    with pytest.raises(Fault, match=r"does not know|a part of a warp"):
        run(f"ld.global.b32 %r2, [%rd3]; {instruction}", NUMBERS)


def test_a_parameter_with_a_sign_keeps_it_in_a_wider_register() -> None:
    text = kernel("", 1).replace(
        "ld.param.b64 %rd1, [k_param_0];", "ld.param.b64 %rd1, [k_param_0];\nld.param.s32 %rd5, [k_param_1];"
    )
    text = text.replace("k_param_0\n)", "k_param_0,\n.param .u32 k_param_1\n)")
    text = text.replace(
        "\tret;", "add.s64 %rd5, %rd5, 9; cvt.u32.u64 %r2, %rd5; st.global.b32 [%rd3], %r2;\nret;"
    )
    buffer = Buffer(np.zeros(4 * THREADS, np.uint8))
    execute(text, (1,), [(buffer, 0), -2], threads=THREADS)
    assert buffer.data.view(np.int32).tolist() == [7] * THREADS


LOOP = """
    mov.u32 %r2, 0;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra $L__end;
$L__again:
    add.s32 %r2, %r2, %r1;
    add.s32 %r3, %r3, 1;
    setp.lt.s32 %p1, %r3, %r1;
    @%p1 bra $L__again;
$L__end:
    st.global.b32 [%rd4], %r2;
"""


def test_threads_that_loop_differently_often_meet_again() -> None:
    assert run(LOOP, NUMBERS).tolist() == [n * n for n in range(THREADS)]


def test_instructions_are_counted_by_the_longest_warp_and_bytes_by_width() -> None:
    first, second = Buffer(NUMBERS.view(np.uint8).copy()), Buffer(np.zeros(4 * THREADS, np.uint8))
    counts = execute(kernel(LOOP), (1,), [(first, 0), (second, 0)], threads=THREADS)
    assert counts.instructions == 5 + 3 + 4 * 63 + 1 + 1  # of thread 63
    assert counts.bytes == {"store 4": 4 * THREADS}


SHARED = "shl.b32 %r5, %r1, 2; xor.b32 %r6, %r5, 128; ld.global.b32 %r2, [%rd3];"
COPY = f"{SHARED} cp.async.ca.shared.global [%r5], [%rd3], 4;"
TAKE = "ld.shared.b32 %r3, [%r6]; st.global.b32 [%rd4], %r3;"  # what the other warp has put there
SWAPPED = np.roll(NUMBERS, 32).tolist()


@pytest.mark.parametrize(
    "body",
    [
        f"{SHARED} st.shared.b32 [%r5], %r2; bar.sync 0; {TAKE}",
        f"{COPY} cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; {TAKE}",
        f"{COPY} cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1; bar.sync 0; {TAKE}",
        f"{COPY} cp.async.wait_all; bar.sync 0; {TAKE}",
    ],
    ids=["stored", "copied", "copied a group ago", "all copied"],
)
def test_what_one_warp_puts_into_shared_memory_another_takes_after_a_barrier(body: str) -> None:
    assert run(body, NUMBERS).tolist() == SWAPPED


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"{SHARED} st.shared.b32 [%r5], %r2; {TAKE}", "race"),
        (f"{SHARED} st.shared.b32 [%r5], %r2; bar.sync 0; {TAKE} st.shared.b32 [%r5], %r1;", "race"),
        (f"{SHARED} st.shared.b32 [%r5], %r2; st.shared.b32 [%r6], %r2; {TAKE}", "race"),
        (f"{SHARED} st.shared.b32 [%r5], 7; bar.sync 0; {TAKE} st.shared.b32 [%r5], 7;", "race"),
        (f"{SHARED} {TAKE}", "nobody has written"),
        (f"{COPY} cp.async.commit_group; bar.sync 0; {TAKE}", "not been waited for"),
        (f"{COPY} cp.async.commit_group; cp.async.wait_group 1; bar.sync 0; {TAKE}", "not been waited for"),
        (f"{COPY} cp.async.commit_group; cp.async.wait_group 0; {TAKE}", "race"),
        (f"{COPY} st.shared.b32 [%r5], %r2;", "on its way"),
        ("st.shared.b32 [%r1 + 512], %r1;", "misaligned"),
        ("mov.u32 %r2, 1024; st.shared.b32 [%r2], %r1;", "out of bounds"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 bra $L__end;\n bar.sync 0;\n$L__end:\n", "not all threads reach"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", "part of a warp"),
        ("ld.global.b32 %r2, [%rd3 + 4];", "out of bounds"),
        ("ld.global.b32 %r2, [%rd3 + 1];", "misaligned"),
        ("add.s64 %rd5, %rd3, 1000000; ld.global.b32 %r2, [%rd5];", "far from every allocation"),
        ("st.global.b32 [%rd4 + -4], %r1;", "out of bounds"),
        ("st.global.b32 [%rd2], %r1;", "two threads"),
        ("nanosleep.u32 5;", "does not know"),
    ],
)
def test_what_a_gpu_forbids_or_leaves_undefined_is_a_fault(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run(body, NUMBERS)


def test_what_nobody_has_written_is_not_loaded_until_somebody_has() -> None:
    unwritten = np.zeros(NUMBERS.nbytes, np.bool_)
    unwritten[40:44] = True
    with pytest.raises(Fault, match="nobody has written"):
        run("ld.global.b32 %r2, [%rd3];", NUMBERS, unwritten=unwritten)
    run("st.global.b32 [%rd3], %r1; ld.global.b32 %r2, [%rd3];", NUMBERS, unwritten=unwritten)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("mov.u32 %r2, %ctaid.x; st.global.b32 [%rd4], %r2;", "different values"),
        ("ld.global.b32 %r3, [%rd4]; add.s32 %r3, %r3, 1; st.global.b32 [%rd4], %r3;", "another program"),
    ],
)
def test_programs_that_write_or_read_what_another_writes_are_a_fault(body: str, why: str) -> None:
    assert run(body, NUMBERS, programs=1) is not None
    for threads in (THREADS, 32):
        with pytest.raises(Fault, match=why):
            run(body, NUMBERS, programs=2, threads=threads)


def test_programs_that_all_write_the_same_are_none() -> None:
    assert run("st.global.b32 [%rd4], %r1;", NUMBERS, programs=3).tolist() == list(range(THREADS))


def test_what_the_launch_before_may_still_write_is_loaded_after_a_wait_only() -> None:
    unfinished = np.ones(NUMBERS.nbytes, np.bool_)
    take = "ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd4], %r2;"
    for early, body in ((False, take), (True, f"griddepcontrol.wait; {take}")):
        assert run(body, NUMBERS, unfinished=unfinished, early=early).tolist() == NUMBERS.tolist()
    with pytest.raises(Fault, match="griddepcontrol"):
        run(take, NUMBERS, unfinished=unfinished, early=True)
    with pytest.raises(Fault, match="griddepcontrol"):
        run("st.global.b32 [%rd4], %r1;", NUMBERS, early=True)


def test_a_program_that_has_nothing_to_do_waits_for_the_launch_before_all_the_same() -> None:
    """What is launched behind it counts on that."""
    with pytest.raises(Fault, match=r"ends without griddepcontrol\.wait"):
        run("mov.u32 %r2, 1;", NUMBERS, early=True)
    run("griddepcontrol.wait;", NUMBERS, early=True)


@pytest.mark.parametrize(
    ("before", "fails"),
    [
        ("", True),
        ("wgmma.fence.sync.aligned;", False),
        ("wgmma.fence.sync.aligned; mov.b32 %r20, 0;", True),
        ("wgmma.fence.sync.aligned; add.s32 %r6, %r20, 1;", True),
        ("mov.b32 %r20, 0; wgmma.fence.sync.aligned;", False),
    ],
    ids=["none", "the first", "written since", "read since", "written before"],
)
def test_registers_of_a_product_that_threads_have_touched_need_a_fence(before: str, fails: bool) -> None:
    """Those of its sum, too, and where it does not add to them."""
    sums = ", ".join(f"%r{20 + number}" for number in range(4))
    product = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{sums}}}, %rd8, %rd8, 0, 1, 1, 0, 0;"
    body = f"""
    shl.b32 %r5, %r1, 4; mov.b64 %rd8, {1 << 62 | 64 << 32}; mov.b64 %rd9, 0;
    st.shared.v2.b64 [%r5], {{%rd9, %rd9}}; st.shared.v2.b64 [%r5 + 2048], {{%rd9, %rd9}};
    st.shared.v2.b64 [%r5 + 4096], {{%rd9, %rd9}}; st.shared.v2.b64 [%r5 + 6144], {{%rd9, %rd9}};
    fence.proxy.async.shared::cta; bar.sync 0; {before}
    {product} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""

    def multiply() -> None:
        buffers = [Buffer(np.zeros(512, np.uint8)) for _ in range(2)]
        execute(kernel(body), (1,), [(buffer, 0) for buffer in buffers], threads=128, shared=8192)

    if fails:
        with pytest.raises(Fault, match=r"since the last wgmma\.fence"):
            multiply()
    else:
        multiply()


OCTETS = """
    ld.global.b32 %r2, [%rd3];
    {
    .reg .s8 s<4>;
    .reg .f32 f<4>;
    mov.b32 {s0, s1, s2, s3}, %r2;
    cvt.rn.f32.s8 f0, s0;
    cvt.rn.f32.s8 f1, s1;
    prmt.b32 %r3, f0, f1, 0x7632;
    }
    st.global.b32 [%rd4], %r3;"""


def test_registers_of_inline_assembly_have_the_types_that_it_declares() -> None:
    """As Triton makes bfloat16 of int8. A guess of 16 bits for each name made all results zero."""
    found = run(OCTETS, NUMBERS).view(np.uint16).astype(np.uint32).reshape(-1, 2)
    assert ((found << 16).view(np.float32) == NUMBERS.view(np.int8).reshape(-1, 4)[:, :2]).all()


HALVES = """
    ld.global.b32 %r2, [%rd3];
    {
    .reg .b32 a;
    .reg .b16 a<2>;
    mov.b32 a, %r2;
    mov.b32 {a0, a1}, a;
    mov.b32 %r3, {a1, a0};
    }
    st.global.b32 [%rd4], %r3;"""


def test_a_name_and_the_same_name_with_numbers_are_different_registers() -> None:
    """As Triton makes bfloat16 of float8."""
    found = run(HALVES, NUMBERS).view(np.uint16).reshape(-1, 2)
    assert (found == NUMBERS.view(np.uint16).reshape(-1, 2)[:, ::-1]).all()


def test_a_register_that_nothing_declares_is_refused() -> None:
    with pytest.raises(Fault, match="f1 is used, but not declared"):
        run(OCTETS.replace("f<4>", "f0"), NUMBERS)
