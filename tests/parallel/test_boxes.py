"""What each process holds is read off the parameter."""

from __future__ import annotations

from itertools import pairwise, product, starmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.blocks import Span, grids, tiles
from dash_shampoo.parallel.boxes import Box, extent, placement
from tests.parallel import jobs
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


@pytest.mark.parametrize(
    ("shape", "sizes", "cuts", "view"),
    [
        ((9, 5), (4,), ["0"], "auto"),
        ((2, 5), (4,), ["0"], "auto"),
        ((6, 7), (4,), ["1"], "auto"),
        ((5,), (4,), ["0"], "auto"),
        ((4, 6, 3), (4,), ["1"], "matrix"),
        ((4, 6, 3), (4,), ["1"], "stack"),
        ((6, 5, 3), (4,), ["0"], "auto"),
        ((4, 6, 5), (4,), ["2"], "auto"),
        ((4, 6, 5), (2, 2), ["0", "2"], "auto"),
        ((5, 3, 6, 4), (4,), ["0"], "stack"),
        ((2, 3, 6, 4), (2, 2), ["2", "3"], "stack"),
        ((7, 4), (2, 2), ["r", "0"], "auto"),
        ((7, 4), (2, 2), ["0", "1"], "auto"),
        ((9, 4), (2, 2), ["0", "0"], "auto"),
        ((3, 4), (2, 2), ["r", "r"], "auto"),
    ],
)
def test_boxes_are_what_torch_cuts(
    processes: Processes, shape: tuple[int, ...], sizes: tuple[int, ...], cuts: list[str], view: str
) -> None:
    assert all(processes.run(jobs.boxes_of, 4, shape, sizes, cuts, view))


class Cut:
    """Stands in for a DTensor of which the first dimension is cut over many processes."""

    def __init__(self, shape: tuple[int, ...], processes: int) -> None:
        mesh = type("Mesh", (), {"mesh": torch.arange(processes)})
        self.shape, self.device_mesh, self.placements = torch.Size(shape), mesh, [torch.distributed.tensor.Shard(0)]


def test_what_a_single_process_holds_is_whole_whatever_its_rank() -> None:
    parameter: Any = Cut((4, 3), 1)
    parameter.device_mesh.mesh = torch.tensor([3])
    assert placement(parameter, (0,), "auto").boxes == [Box((0, 1), (0, 4), (0, 3))]


@given(rows=st.integers(0, 100), processes=st.integers(1, 40))
def test_uneven_cuts_are_those_of_chunk(rows: int, processes: int) -> None:
    parameter: Any = Cut((rows, 3), processes)
    found = [box.rows for box in placement(parameter, range(processes), "auto").boxes]
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(processes)] if rows else []
    assert [stop - start for start, stop in found] == chunks + [0] * (processes - len(chunks))
    assert all(before[1] == after[0] for before, after in pairwise(found))


def test_72_rows_on_16_processes() -> None:
    parameter: Any = Cut((72, 3), 16)
    assert [box.shape[1] for box in placement(parameter, range(16), "auto").boxes] == [5] * 14 + [2, 0]


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20)),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    most=st.integers(1, 200),
    cut=st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 20)),
)
def test_tiles_meet_boxes_in_each_element_once(
    shape: tuple[int, int, int], block: tuple[int, int], most: int, cut: tuple[int, int, int]
) -> None:
    halves = [[(0, min(i, length)), (min(i, length), length)] for i, length in zip(cut, shape, strict=True)]
    boxes = list(starmap(Box, product(*halves)))
    stack = torch.zeros(shape)
    for down, across in grids(Span(0, 1, shape[1]), Span(0, 1, shape[2]), block):
        for tile in tiles(shape[0], down, across, most=most):
            for box in boxes:
                both = extent(tile).meet(box)
                if both is not None:
                    both.of(box.of(stack), box).add_(1)
    assert (stack == 1).all()


def test_tensor_parallel_parameters_move_as_on_one_process(processes: Processes) -> None:
    assert_equal(processes.run(jobs.two_dimensional, 4, 5), jobs.one_dimensional(5))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fsdp1", "FSDP2"),
        ("fsdp1 original", "FSDP2"),
        ("third dimension", "shard it along dimension 0"),
        ("partial", "partial sums"),
    ],
)
def test_what_hides_a_shape_is_refused_with_what_does_not(processes: Processes, kind: str, words: str) -> None:
    for message in processes.run(jobs.refusal, 2, kind):
        assert words in message


def test_parameters_that_deepspeed_has_partitioned_are_refused() -> None:
    weight = nn.Parameter(torch.empty(0))
    weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="DeepSpeed"):
        Dash([weight])


def test_a_flat_vector_in_the_place_of_matrices_is_refused() -> None:
    """As DeepSpeed's ZeRO makes of an optimizer that it is given."""
    optimizer = Dash(nn.Linear(3, 4).parameters())
    flat = nn.Parameter(torch.zeros(16))
    flat.grad = torch.ones(16)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(TypeError, match="flattened"):
        optimizer.step()
    vectors = Dash([nn.Parameter(torch.zeros(3))])
    vectors.param_groups[0]["params"] = [flat]
    vectors.step()
