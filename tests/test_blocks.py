"""Tiles cover a stack of matrices once, as views that read and write it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.blocks import Span, Tile, as_stack, grids, pieces, stack_shape, tiles


def cover(depth: int, rows: int, columns: int, block: tuple[int, int], most: int | None = None) -> list[Tile]:
    whole = Span(0, 1, rows), Span(0, 1, columns)
    return [tile for down, across in grids(*whole, block) for tile in tiles(depth, down, across, most=most)]


@given(
    depth=st.integers(1, 5),
    rows=st.integers(0, 40),
    columns=st.integers(0, 40),
    block=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    most=st.one_of(st.none(), st.integers(1, 300)),
)
def test_tiles_cover_each_element_once(
    depth: int, rows: int, columns: int, block: tuple[int, int], most: int | None
) -> None:
    stack = torch.zeros(depth, rows, columns)
    for tile in cover(depth, rows, columns, block, most):
        tile.of(stack).add_(1)
        assert tile.block[0] <= block[0]
        assert tile.block[1] <= block[1]
        assert most is None or tile.blocks == 1 or tile.blocks * tile.block[0] * tile.block[1] <= most
    assert (stack == 1).all()


def test_remainders_on_both_sides_give_four_block_shapes() -> None:
    found = cover(3, 10, 7, (4, 3))
    assert [tile.block for tile in found] == [(4, 3), (4, 1), (2, 3), (2, 1)]
    assert [tile.grid for tile in found] == [(3, 2, 2), (3, 2, 1), (3, 1, 2), (3, 1, 1)]


def test_blocks_are_the_slices_one_would_expect() -> None:
    stack = torch.arange(160.0).view(2, 10, 8).mT  # strides (80, 1, 8)
    tile = cover(2, 8, 10, (3, 4))[0]
    blocks = tile.of(stack)
    for k in range(tile.grid[0]):
        for i in range(tile.grid[1]):
            for j in range(tile.grid[2]):
                assert torch.equal(blocks[k, i, j], stack[k, 3 * i : 3 * i + 3, 4 * j : 4 * j + 4])


@pytest.mark.parametrize(
    ("shape", "auto", "matrix", "stack"),
    [
        ((), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        ((5,), (1, 5, 1), (1, 5, 1), (1, 5, 1)),
        ((2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3)),
        ((0, 3), (1, 0, 3), (1, 0, 3), (1, 0, 3)),
        ((4, 3, 2), (4, 3, 2), (1, 4, 6), (4, 3, 2)),
        ((4, 3, 2, 2), (1, 4, 12), (1, 4, 12), (12, 2, 2)),
        ((2, 1, 3, 2, 2), (1, 2, 12), (1, 2, 12), (6, 2, 2)),
    ],
)
def test_a_tensor_is_read_as_a_stack_of_matrices(
    shape: tuple[int, ...], auto: tuple[int, ...], matrix: tuple[int, ...], stack: tuple[int, ...]
) -> None:
    size = torch.Size(shape)
    assert [stack_shape(size, view) for view in ("auto", "matrix", "stack")] == [auto, matrix, stack]


def test_a_stack_is_a_view_of_a_tensor_wherever_strides_allow_it() -> None:
    views = [torch.zeros(3, 4).t(), torch.zeros(2, 3, 2, 2), torch.zeros(5)[::2], torch.zeros(()), torch.zeros(2, 3, 4)]
    copy = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    for tensor in views:
        as_stack(tensor, "auto").fill_(1)
        assert (tensor == 1).all()
    as_stack(copy, "auto").fill_(1)
    assert (copy == 0).all()


def test_fused_matrices_are_split_into_equal_parts_or_given_lengths() -> None:
    assert pieces(12, None) == [Span(0, 1, 12)]
    assert pieces(12, 3) == [Span(0, 1, 4), Span(4, 1, 4), Span(8, 1, 4)]
    assert pieces(12, (8, 2, 2)) == [Span(0, 1, 8), Span(8, 1, 2), Span(10, 1, 2)]
    with pytest.raises(ValueError, match="12 does not divide into 5 equal parts"):
        pieces(12, 5)
    with pytest.raises(ValueError, match="8 \\+ 2 does not make 12"):
        pieces(12, (8, 2))
