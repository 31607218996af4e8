"""Products with weights in 8 and 4 bits. They are widened in registers, exactly. The sum gets the scale."""

import triton
import triton.language as tl

GROUP = tl.constexpr(16)  # inputs of a step; `engine/quantization/int4.py`


@triton.jit(do_not_specialize=["rows"])
def int8_linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y = x (values * scales)^T + bias. Grid (blocks of outputs, tiles of rows).

    x: [N, inputs], values: [outputs, inputs] int8, scales: [outputs] float32, bias: [outputs],
    y: [N, outputs].
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < rows, column < outputs
    x = x_ptr + row.to(tl.int64) * x_stride
    values = values_ptr + column.to(tl.int64) * inputs
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inputs, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        inside = depth < inputs
        a = tl.load(x[:, None] + depth[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(values[:, None] + depth[None, :], mask=there[:, None] & inside[None, :], other=0)
        b = b.to(tl.int32).to(tl.float32).to(a.dtype)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    acc *= tl.load(scales_ptr + column, mask=there, other=0.0)[None, :]
    store_sums(acc, bias_ptr, y_ptr, row, column, live, there, outputs, BIAS)


@triton.jit(do_not_specialize=["rows"])
def int4_linear_kernel(
    x_ptr,
    levels_ptr,
    steps_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    groups,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y = x (levels * steps * scales)^T + bias. Grid (blocks of outputs, tiles of rows).

    levels: [outputs, groups * 8] int8, two a byte, an even input in the lower half. steps: [outputs, groups]
    uint8, the codes of `engine/quantization/int4.py`. The others: see `int8_linear_kernel`.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < rows, column < outputs
    x = x_ptr + row.to(tl.int64) * x_stride
    levels = levels_ptr + column.to(tl.int64) * groups * (GROUP // 2)
    steps = steps_ptr + column.to(tl.int64) * groups
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inputs, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        a = tl.load(x[:, None] + depth[None, :], mask=live[:, None] & (depth < inputs)[None, :], other=0.0)
        byte = begin // 2 + tl.arange(0, DEPTH // 2)
        inside = there[:, None] & (byte < groups * (GROUP // 2))[None, :]
        both = tl.load(levels[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
        level = tl.join(both << 28 >> 28, both >> 4).reshape(COLUMNS, DEPTH // GROUP, GROUP)
        group = begin // GROUP + tl.arange(0, DEPTH // GROUP)
        inside = there[:, None] & (group < groups)[None, :]
        code = tl.load(steps[:, None] + group[None, :], mask=inside, other=0).to(tl.int32)
        # A float with four bits of fraction and three of exponent, from 2^-7 on.
        step = ((code & 127) + (120 << 4) << 19 | code >> 7 << 31).to(tl.float32, bitcast=True)
        # Eight significant bits: exact in bfloat16 and float16.
        b = (level.to(tl.float32) * step[:, :, None]).to(a.dtype).reshape(COLUMNS, DEPTH)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    acc *= tl.load(scales_ptr + column, mask=there, other=0.0)[None, :]
    store_sums(acc, bias_ptr, y_ptr, row, column, live, there, outputs, BIAS)


@triton.jit
def store_sums(acc, bias_ptr, y_ptr, row, column, live, there, outputs, BIAS: tl.constexpr):
    """Adds the bias to the sums, rounds once and stores."""
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    y = y_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & there[None, :])
