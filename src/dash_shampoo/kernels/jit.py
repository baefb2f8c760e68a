"""Triton kernels: products of stacks with float32 in and out, on tensor cores in between.

Only `dash_shampoo.kernels.fused` imports this module, where Triton is there. Offsets are 64-bit, rows and columns that
a tile has beyond the matrix are masked, and strides are free. Names in capitals are known at compile time.
"""

import triton
import triton.language as tl

from dash_shampoo.kernels.formats import LOW_SCALE

_LOW = tl.constexpr(LOW_SCALE)


@triton.jit
def product_kernel(
    a_ptr,
    b_ptr,
    add_ptr,
    out_ptr,
    size,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    add_batch,
    add_row,
    add_column,
    out_batch,
    out_row,
    out_column,
    alpha,
    beta,
    shift,
    PRECISION: tl.constexpr,
    MIRRORED: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """out = alpha a b + beta add + shift I, each (n, size, size), a tile per program.

    ``MIRRORED`` computes tiles on and below the diagonal alone, and stores both halves: the result is symmetric to the
    bit. ``add`` must then be symmetric, and the product but for rounding.
    """
    across = (size + TILE - 1) // TILE
    tiles = across * (across + 1) // 2 if MIRRORED else across * across
    batch, tile = _batch(tiles)
    i, j = _lower(tile) if MIRRORED else (tile // across, tile % across)
    a_ptr += batch * a_batch
    b_ptr += batch * b_batch
    out_ptr += batch * out_batch
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    strides = a_row, a_column, b_row, b_column
    total = _tile(a_ptr, b_ptr, row, column, size, size, strides, PRECISION, TILE, INNER)
    total = alpha * total + tl.where(row[:, None] == column[None, :], shift, 0.0)
    far_row, far_column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    inside = (row < size)[:, None] & (column < size)[None, :]
    if ADD:
        add_ptr += batch * add_batch
        total += beta * tl.load(add_ptr + far_row * add_row + far_column * add_column, inside, 0.0)
    if MIRRORED:
        if i == j:
            total = tl.where(row[:, None] >= column[None, :], total, tl.trans(total))
        else:
            tl.store(out_ptr + far_column * out_row + far_row * out_column, total, inside)
    tl.store(out_ptr + far_row * out_row + far_column * out_column, total, inside)


@triton.jit
def accumulate_kernel(
    half_ptr,
    keep_ptr,
    out_ptr,
    size,
    depth,
    half_batch,
    half_row,
    half_column,
    keep_batch,
    out_batch,
    out_row,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """out <- keep out + half half^T on and below the diagonal of out (n, size, size), for half (n, size, depth)."""
    across = (size + TILE - 1) // TILE
    batch, tile = _batch(across * (across + 1) // 2)
    i, j = _lower(tile)
    half_ptr += batch * half_batch
    out_ptr += batch * out_batch
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    strides = half_row, half_column, half_column, half_row
    total = _tile(half_ptr, half_ptr, row, column, size, depth, strides, PRECISION, TILE, INNER)
    inside = (row < size)[:, None] & (column[None, :] <= row[:, None])
    out_ptr += row.to(tl.int64)[:, None] * out_row + column[None, :]
    total += tl.load(keep_ptr + batch * keep_batch) * tl.load(out_ptr, inside, 0.0)
    tl.store(out_ptr, total, inside)


@triton.jit
def _batch(tiles):
    """The matrix that a program is for, 64-bit, and its tile in it."""
    program = tl.program_id(0)
    return (program // tiles).to(tl.int64), program % tiles


@triton.jit
def _lower(tile):
    """Row and column of a tile on or below the diagonal, counted by rows."""
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)  # the root is rounded
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    return i, tile - i * (i + 1) // 2


@triton.jit
def _tile(
    a_ptr,
    b_ptr,
    row,
    column,
    size,
    depth,
    strides,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of the product of a (size, depth) and b (depth, size), added up in float32."""
    a_row, a_column, b_row, b_column = strides
    inner = tl.arange(0, INNER)
    a_ptr += row.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_column
    b_ptr += inner.to(tl.int64)[:, None] * b_row + column.to(tl.int64)[None, :] * b_column
    total = tl.full((TILE, TILE), 0.0, tl.float32)
    cross = tl.full((TILE, TILE), 0.0, tl.float32)
    for start in range(0, depth, INNER):
        left = depth - start
        a = tl.load(a_ptr, (row < size)[:, None] & (inner < left)[None, :], 0.0)
        b = tl.load(b_ptr, (inner < left)[:, None] & (column < size)[None, :], 0.0)
        if PRECISION == "tf32":
            total = tl.dot(_round_tf32(a), _round_tf32(b), total, input_precision="tf32")
        else:
            a_high, b_high = a.to(tl.float16), b.to(tl.float16)
            if PRECISION == "fp16x3":
                a_low = ((a - a_high.to(tl.float32)) * _LOW).to(tl.float16)
                b_low = ((b - b_high.to(tl.float32)) * _LOW).to(tl.float16)
                cross = tl.dot(a_high, b_low, cross)
                cross = tl.dot(a_low, b_high, cross)
            total = tl.dot(a_high, b_high, total)
        a_ptr += INNER * a_column
        b_ptr += INNER * b_row
    if PRECISION == "fp16x3":
        total += cross * (1.0 / _LOW)
    return total


@triton.jit
def _round_tf32(matrix):
    """To nearest in TF32, as tensor cores only cut off; NaN stays what it is, where a carry would make it zero."""
    bits = matrix.to(tl.int32, bitcast=True)
    rounded = ((bits + (1 << 12)) & -(1 << 13)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, matrix, rounded)
