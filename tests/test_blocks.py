"""Tiles cover a matrix once, as views that read and write it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.blocks import as_matrix, is_matrix_view, matrix_shape, tiles


@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 40),
    block=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    most=st.one_of(st.none(), st.integers(1, 300)),
)
def test_tiles_cover_each_element_once(rows: int, columns: int, block: tuple[int, int], most: int | None) -> None:
    matrix = torch.zeros(rows, columns)
    for tile in tiles(rows, columns, block, most=most):
        tile.of(matrix).add_(1)
        assert tile.block[0] <= block[0]
        assert tile.block[1] <= block[1]
        assert most is None or tile.grid[0] == 1 or tile.blocks * tile.block[0] * tile.block[1] <= most
    assert (matrix == 1).all()


def test_remainders_on_both_sides_give_four_block_shapes() -> None:
    found = tiles(10, 7, (4, 3))
    assert [tile.block for tile in found] == [(4, 3), (4, 1), (2, 3), (2, 1)]
    assert [tile.grid for tile in found] == [(2, 2), (2, 1), (1, 2), (1, 1)]


def test_blocks_are_the_slices_one_would_expect() -> None:
    matrix = torch.arange(80.0).view(10, 8).t()  # strides (1, 8)
    tile = tiles(8, 10, (3, 4))[0]
    blocks = tile.of(matrix)
    for i in range(tile.grid[0]):
        for j in range(tile.grid[1]):
            assert torch.equal(blocks[i, j], matrix[3 * i : 3 * i + 3, 4 * j : 4 * j + 4])


def test_matrix_shape_is_first_dimension_by_rest() -> None:
    shapes = [(), (5,), (2, 3), (4, 3, 2, 2), (0, 3), (3, 0)]
    assert [matrix_shape(torch.Size(shape)) for shape in shapes] == [
        (1, 1),
        (5, 1),
        (2, 3),
        (4, 12),
        (0, 3),
        (3, 0),
    ]


def test_is_matrix_view_tells_whether_writes_reach_the_tensor() -> None:
    variants = [torch.zeros(3, 4).t(), torch.zeros(2, 3, 2, 2), torch.zeros(5)[::2], torch.zeros(())]
    variants.append(torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    for tensor in variants:
        as_matrix(tensor).fill_(1)
        assert bool((tensor == 1).all()) == is_matrix_view(tensor)
