"""Runs cover each block once, in the order of the stack."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.blocks import Span, Tile, as_stack, grids, tiles
from dash_shampoo.parallel.boxes import placement
from dash_shampoo.parallel.runs import Member, runs


def members(shape: tuple[int, int, int], block: tuple[int, int], most: int, count: int) -> list[Member]:
    found = []
    for place in range(count):
        parameter = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1e4 * place
        held = placement(parameter, [0], "stack")
        for down, across in grids(Span(0, 1, shape[1]), Span(0, 1, shape[2]), block):
            for i, tile in enumerate(tiles(shape[0], down, across, most=most)):
                found.append(Member(parameter, place, {"view": "stack"}, tile, ((f"tile{i}", tile.blocks),), held))
    return found


def blocks_of(member: Member, tile: Tile) -> torch.Tensor:
    return tile.of(as_stack(member.parameter, "stack")).reshape(-1, *tile.block)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    most=st.integers(1, 60),
    limit=st.integers(0, 30),
    count=st.integers(1, 3),
)
def test_joined_members_have_the_blocks_of_their_tiles(
    shape: tuple[int, int, int], block: tuple[int, int], most: int, limit: int, count: int
) -> None:
    every = members(shape, block, most, count)
    for size in {member.tile.block for member in every}:  # a stack's
        own = [member for member in every if member.tile.block == size]
        largest = max(member.tile.blocks for member in own)
        expected = [blocks_of(member, member.tile) for member in own]
        found, names = [], []
        for portion in runs(own, limit):
            assert sum(run.blocks for run in portion) <= max(limit, largest)
            for run in portion:
                assert all(member.tile == run.tile for member in run.members)
                for member in run.members:
                    found.append(blocks_of(member, member.tile))
                    names += [(member.place, *name) for name in member.names]
        assert sorted(torch.cat(found).flatten().tolist()) == sorted(torch.cat(expected).flatten().tolist())
        assert sum(blocks for *_, blocks in names) == sum(member.tile.blocks for member in own)


def test_the_tiles_of_a_matrix_and_equal_matrices_make_one_run() -> None:
    ((run,),) = runs(members((2, 8, 8), (4, 4), 16, 3), 100)
    assert (run.blocks, run.whole, len(run.members)) == (24, True, 3)
    assert [name for name, _ in run.members[0].names] == [f"tile{i}" for i in range(8)]
    blocks = torch.cat([blocks_of(member, member.tile) for member in run.members])
    rectangles = torch.stack([as_stack(member.parameter, "stack") for member in run.members])
    assert torch.equal(run.as_rectangles(blocks), rectangles)
    assert torch.equal(run.as_tiles_of_rectangles(rectangles).reshape(-1, 4, 4), blocks)
