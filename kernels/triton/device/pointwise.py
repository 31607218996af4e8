"""The pointwise kernels. Each reads and writes its data once."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    x_outer,
    x_inner,
    residual_stride,
    inner,
    eps,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ADD: tl.constexpr,
):
    """y = s / sqrt(mean(s^2) + eps) * weight. s = x, or residual + x rounded to their type. One row per
    program.

    Row r of x lies at r // inner * x_outer + r % inner * x_inner.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDE)
    real = n < SIZE
    x = tl.load(x_ptr + row // inner * x_outer + row % inner * x_inner + n, mask=real, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + n, mask=real, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + n, x, mask=real)
    wide = x.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps))
    weight = tl.load(weight_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + n, (scaled * weight).to(x.dtype), mask=real)


@triton.jit
def _rotate(x_ptr, cos, sin, head, half, inside, HEAD: tl.constexpr, HALF: tl.constexpr):
    at = x_ptr + head[:, None] * HEAD + half[None, :]
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(first.dtype), mask=inside)
    tl.store(at + HALF, (b * cos + a * sin).to(first.dtype), mask=inside)


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_stride,
    k_stride,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """(x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin). One token and HEADS heads of q or of k per program.

    Heads are HEAD elements apart; the first 2 HALF elements of each are rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, WIDE)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * HALF + half, mask=half < HALF, other=0.0)[None, :]
    block = tl.program_id(1)
    if block < tl.cdiv(Q_HEADS, HEADS):
        head = block * HEADS + tl.arange(0, HEADS)
        inside = (head < Q_HEADS)[:, None] & (half < HALF)[None, :]
        _rotate(q_ptr + token * q_stride, cos, sin, head, half, inside, Q_HEAD, HALF)
    else:
        head = (block - tl.cdiv(Q_HEADS, HEADS)) * HEADS + tl.arange(0, HEADS)
        inside = (head < K_HEADS)[:, None] & (half < HALF)[None, :]
        _rotate(k_ptr + token * k_stride, cos, sin, head, half, inside, K_HEAD, HALF)


@triton.jit
def act_and_mul_kernel(x_ptr, y_ptr, x_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """y = gate / (1 + exp(-z)) * up, x = (gate, up). One block of one row per program.

    SiLU: z = gate. GELU's tanh form: z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    gate = tl.load(x_ptr + row * x_stride + n, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + n, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    z = 1.5957691216 * (wide + 0.044715 * wide * wide * wide) if GELU else wide
    tl.store(y_ptr + row * size + n, (wide / (1.0 + tl.exp(-z)) * up).to(gate.dtype), mask=inside)


@triton.jit
def append_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    index_ptr,
    k_stride,
    v_stride,
    page_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """cache[index // PAGE, :, index % PAGE] = k[token], and the same for v. One token per program.

    Values are clamped to LARGEST before they are rounded to the cache's type; 0: they are not.
    """
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + token)
    n = tl.arange(0, WIDE)
    inside = n < HEADS * DIM
    place = index // PAGE * page_stride + (n // DIM * PAGE + index % PAGE) * DIM + n % DIM
    k = tl.load(k_ptr + token * k_stride + n, mask=inside)
    v = tl.load(v_ptr + token * v_stride + n, mask=inside)
    if LARGEST > 0:
        k = tl.clamp(k.to(tl.float32), -LARGEST, LARGEST)
        v = tl.clamp(v.to(tl.float32), -LARGEST, LARGEST)
    tl.store(k_cache_ptr + place, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_cache_ptr + place, v.to(v_cache_ptr.dtype.element_ty), mask=inside)
