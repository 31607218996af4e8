"""The experts' products in one launch: groups of rows, each with its own weight (a grouped GEMM)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["experts"])
def expert_linear_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    starts_ptr,
    experts,
    x_stride,
    outputs,
    inputs,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y[i] = x[i] W_e^T for starts[e] <= i < starts[e + 1]. Grid (tiles of rows, blocks of outputs).

    x: [N, inputs], weight: [experts, outputs, inputs], y: [N, outputs], starts: [experts + 1] int32.
    """
    tile = tl.program_id(0)
    # The tiles of expert e begin at starts[e] // ROWS + e. That is enough; a few stay unused.
    each = tl.arange(0, EXPERTS)
    starts = tl.load(starts_ptr + each, mask=each < experts, other=1 << 30)
    bases = starts // ROWS + each
    before = bases <= tile
    expert = tl.sum(before.to(tl.int32), 0) - 1
    tile -= tl.max(tl.where(before, bases, 0), 0)
    start = tl.load(starts_ptr + expert)
    stop = tl.load(starts_ptr + expert + 1)
    first = start + tile * ROWS
    if first < stop:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        live, there = row < stop, column < outputs
        x = x_ptr + row.to(tl.int64) * x_stride
        weight = weight_ptr + (expert.to(tl.int64) * outputs + column) * inputs
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, inputs, DEPTH):
            depth = begin + tl.arange(0, DEPTH)
            inside = depth < inputs
            a = tl.load(x[:, None] + depth[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight[None, :] + depth[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        y = y_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & there[None, :])
