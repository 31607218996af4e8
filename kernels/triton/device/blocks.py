"""Products with weights in GGUF's blocks, as `kernels/triton/blocks.py` lays them out. They are widened in
registers to what the file says, rounded once."""

import triton
import triton.language as tl

from personae.kernels.triton.device.quantized import store_sums


@triton.jit(do_not_specialize=["rows"])
def block_linear_kernel(
    x_ptr,
    levels_ptr,
    high_ptr,
    scales_ptr,
    least_ptr,
    codes_ptr,
    least_codes_ptr,
    bias_ptr,
    y_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES: tl.constexpr,
    LEAST: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y = x W^T + bias, W = scale * code * (level - ZERO) - least * least_code. Grid (blocks of outputs,
    tiles of rows).

    x: [N, inputs], bias: [outputs], y: [N, outputs]. levels: [outputs, inputs] int8 with 8 BITS, else
    [outputs, inputs / 2] uint8, an even input in the lower half; high: with 6 BITS [outputs, inputs / 4]
    uint8, the two bits above of four inputs. scales, least: [outputs, inputs / BLOCK] float16 or float32.
    codes, least_codes: [outputs, inputs / GROUP] int8; 1 without CODES. There is no least without LEAST.
    inputs: a multiple of BLOCK.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < rows, column < outputs
    x = x_ptr + row.to(tl.int64) * x_stride
    before = column.to(tl.int64) * inputs  # weights of the outputs before
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inputs, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        a = tl.load(x[:, None] + depth[None, :], mask=live[:, None] & (depth < inputs)[None, :], other=0.0)
        if BITS == 8:
            inside = there[:, None] & (depth < inputs)[None, :]
            level = tl.load((levels_ptr + before)[:, None] + depth[None, :], mask=inside, other=0).to(
                tl.int32
            )
        else:
            byte = begin // 2 + tl.arange(0, DEPTH // 2)
            inside = there[:, None] & (byte < inputs // 2)[None, :]
            both = tl.load((levels_ptr + before // 2)[:, None] + byte[None, :], mask=inside, other=0).to(
                tl.int32
            )
            level = tl.join(both & 15, both >> 4).reshape(COLUMNS, DEPTH)
        if BITS == 6:
            quarter = begin // 4 + tl.arange(0, DEPTH // 4)
            inside = there[:, None] & (quarter < inputs // 4)[None, :]
            four = tl.load((high_ptr + before // 4)[:, None] + quarter[None, :], mask=inside, other=0).to(
                tl.int32
            )
            two = tl.join(four & 15, four >> 4).reshape(COLUMNS, DEPTH // 2)
            level += tl.join(two & 3, two >> 2).reshape(COLUMNS, DEPTH) << 4
        group = begin // GROUP + tl.arange(0, DEPTH // GROUP)
        inside = there[:, None] & (group < inputs // GROUP)[None, :]
        block = (before // BLOCK)[:, None] + (group * GROUP // BLOCK)[None, :]
        code = (before // GROUP)[:, None] + group[None, :]
        scale = tl.load(scales_ptr + block, mask=inside, other=0.0).to(tl.float32)
        if CODES:
            scale *= tl.load(codes_ptr + code, mask=inside, other=0).to(tl.float32)
        wide = (level - ZERO).to(tl.float32).reshape(COLUMNS, DEPTH // GROUP, GROUP) * scale[:, :, None]
        if LEAST:
            least = tl.load(least_ptr + block, mask=inside, other=0.0).to(tl.float32)
            if CODES:
                least *= tl.load(least_codes_ptr + code, mask=inside, other=0).to(tl.float32)
            wide -= least[:, :, None]
        b = wide.to(a.dtype).reshape(COLUMNS, DEPTH)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    store_sums(acc, bias_ptr, y_ptr, row, column, live, there, outputs, BIAS)
