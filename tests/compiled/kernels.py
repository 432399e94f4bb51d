"""Kernels that the gate has to refuse, one for each thing that it looks for."""

import triton
import triton.language as tl


@triton.jit
def spilling_kernel(x, out, N: tl.constexpr):
    """More values per thread than the launch's register limit leaves room for."""
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, v - tl.max(v, 0))


@triton.jit
def narrow_kernel(logits, out, n, N: tl.constexpr):
    """Loads one logit at a time and spends two exp2 on it, as a running softmax with a rescaled sum does."""
    i = tl.arange(0, N)
    m = tl.full([N], -3.0e38, tl.float32)
    c = tl.zeros([N], tl.float32)
    for j in tl.range(0, n, N):
        x = tl.load(logits + 3 * (j + i)).to(tl.float32)
        top = tl.maximum(m, x)
        c = c * tl.exp2(m - top) + tl.exp2(x - top)
        m = top
    tl.store(out + i, m + c)


@triton.jit
def retrying_kernel(out, x):
    """An atomic maximum by compare-and-swap."""
    v = tl.load(x)
    old = tl.load(out)
    while old < v:
        old = tl.atomic_cas(out, old, v)
