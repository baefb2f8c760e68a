"""The plan of models too large to be tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dash_shampoo.parallel.boxes import Box, extent
from dash_shampoo.parallel.ownership import Ownership
from dash_shampoo.parallel.world import World, Worlds
from dash_shampoo.plan.budget import choices, plan_model
from dash_shampoo.plan.devices import DEVICES
from dash_shampoo.plan.model import meta_model, options, parameters
from dash_shampoo.plan.plan import Plan, own
from dash_shampoo.plan.products import LOWER, of_roots
from dash_shampoo.plan.ranks import Ranks, ranks
from dash_shampoo.plan.seconds import Rates
from dash_shampoo.plan.tiles import STAGES, tiles_of
from dash_shampoo.plan.traffic import traffic
from dash_shampoo.roots import Minimax, products
from dash_shampoo.train.llama import SIZES
from tests.plan import jobs

RATES = Rates(DEVICES["h100"], 0.5)
CUDA = torch.device("cuda")


def plan(size: str, some: Ranks, **given: Any) -> Plan:
    return plan_model(meta_model(SIZES[size]), given, some, RATES, CUDA)


class Stub(World):
    """Processes that there are not."""

    def __init__(self, size: int) -> None:
        self.ranks, self.rank = tuple(range(size)), 0


class Stubs(Worlds):
    def __init__(self, size: int) -> None:
        self._stub = Stub(size)

    def of(self, parameter: Any) -> World:
        return self._stub


@pytest.mark.parametrize("options_given", [{}, {"update_every": 1, "vectors": "shampoo", "block_size": 512}])
def test_owners_are_those_of_a_run(options_given: dict[str, Any]) -> None:
    given = parameters(meta_model(SIZES["llama-1b"]), options(options_given).defaults)
    owners, loads = own(tiles_of(given), Ranks(16, 1), given[0][0].device)
    entries = Ownership(Stubs(16)).entries(given)
    assert owners.tolist() == [owner for entry in entries for owner in entry.owners]
    assert loads.sum() == pytest.approx(sum(tiles_of(given).costs))


@pytest.mark.parametrize(("size", "processes", "most"), [("llama-953m", 8, 1.05), ("llama-7b", 64, 1.10)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("update_every", [1, 10])
def test_the_load_is_balanced(size: str, processes: int, most: float, strategy: str, update_every: int) -> None:
    found = plan(size, ranks(strategy, processes, None), block_size=1024, update_every=update_every)
    assert 1 <= found.balance <= most
    assert found.amounts["seconds"].max() <= most * found.amounts["seconds"].mean()
    assert found.amounts["state"].max() <= most * found.amounts["state"].mean()


@pytest.mark.parametrize(("strategy", "replicas"), [("fsdp", None), ("hsdp", 8), ("hsdp", 512), ("ddp", None)])
def test_the_largest_model_on_thousands_of_processes(strategy: str, replicas: int | None) -> None:
    some = ranks(strategy, 4096, replicas)
    found = plan("llama-405b", some)
    count = 405_853_388_800
    assert found.amounts["elements"].sum() == count
    assert found.amounts["state/means"].sum() == found.amounts["state/statistics"].sum() == 4 * count
    assert found.balance <= 1.05
    sent, received = found.amounts["wire/sent"], found.amounts["wire/received"]
    assert sent.sum() == pytest.approx(received.sum())
    if strategy != "ddp":
        # All but what is already where it is needed goes once to its owner, and from there to every copy.
        moved = found.amounts["wire/gradients/sent"].sum()
        assert moved == pytest.approx(4 * count * (1 - 1 / some.shards), rel=1e-2)
        assert found.amounts["wire/updates/sent"].sum() == pytest.approx(4 * count * (some.copies - 1) + moved)


@pytest.mark.parametrize(("processes", "replicas"), [(1, 1), (3, 1), (4, 2), (6, 3), (6, 6), (50, 1), (60, 2)])
def test_traffic_is_that_of_every_pair_of_a_tile_and_a_process(processes: int, replicas: int) -> None:
    given = parameters(jobs.make_model("mixed shapes"), options({"block_size": 8}).defaults)
    tiles, some = tiles_of(given), Ranks(processes, replicas)
    owners = own(tiles, some, CUDA)[0]
    found = traffic(tiles, owners, some)
    if some.replicated:
        assert (found.held == sum(parameter.numel() for parameter, _ in given)).all()
        return
    expected = {name: np.zeros(processes, np.int64) for name in found._fields}
    for cut, tile_owners in zip(tiles.cuts, tiles.of_parameters(owners), strict=True):
        bounds = some.bounds(cut.shape[0]).tolist()
        for rank in range(processes):
            shard = rank % some.shards
            held = Box((0, 1), (bounds[shard], bounds[shard + 1]), (0, cut.shape[1]))
            expected["held"][rank] += held.size
            for start, stop, width, owner in zip(cut.start, cut.stop, cut.width, tile_owners, strict=True):
                common = held.meet(Box((0, 1), (int(start), int(stop)), (0, int(width))))
                size = common.size if common else 0
                same_copy = owner // some.shards == rank // some.shards
                expected["gradients_out"][rank] += size * same_copy
                expected["gradients_in"][owner] += size * same_copy
                expected["updates_out"][owner] += size
                expected["updates_in"][rank] += size
                expected["stays"][rank] += size * (owner == rank)
                expected["owned"][owner] += size * same_copy
    for name, values in found._asdict().items():
        assert values.tolist() == expected[name].tolist(), name


def test_tiles_are_those_of_every_parameter_by_itself() -> None:
    given = parameters(meta_model(SIZES["tiny"]), options({}).defaults)
    tiles = tiles_of(given)
    assert len(tiles.stack) == len(tiles.costs) == sum(len(tiles_of([each]).costs) for each in given)
    for (parameter, _), cut in zip(given, tiles.cuts, strict=True):
        assert cut.amounts["elements"].sum() == parameter.numel()
    assert len({id(cut) for cut in tiles.cuts}) < len(tiles.cuts) / 3  # equal layers are cut once


def test_roots_are_spread_over_the_steps_between_them() -> None:
    often, seldom = (plan("llama-953m", Ranks(8, 1), update_every=each).amounts for each in (1, 10))
    assert often["flops/roots"].sum() == pytest.approx(10 * seldom["flops/roots"].sum())
    assert often["flops/roots"].sum() == pytest.approx(often["flops/roots due"].sum())
    assert seldom["flops/roots due"].max() < 1.15 * seldom["flops/roots"].mean()
    assert seldom["seconds/longest step"].max() < 1.15 * seldom["seconds"].max()
    parts = sum(seldom[f"flops/{stage}"] for stage in STAGES)
    np.testing.assert_allclose(parts, seldom["flops"])


def test_roots_of_a_small_model_are_renewed_at_once() -> None:
    found = plan("tiny", Ranks(1, 1), update_every=10).amounts
    assert found["flops/roots due"].sum() == pytest.approx(10 * found["flops/roots"].sum())


def test_time_follows_the_rates() -> None:
    model, some = meta_model(SIZES["llama-953m"]), Ranks(8, 1)
    slow, fast = (plan_model(model, {}, some, RATES._replace(efficiency=each), CUDA).seconds for each in (0.25, 0.5))
    assert slow == pytest.approx(2 * fast)
    plain = plan_model(model, {"precision": "fp32"}, some, RATES, CUDA).amounts
    mixed = plan_model(model, {"precision": "mixed"}, some, RATES, CUDA).amounts
    assert mixed["seconds/roots"].max() < plain["seconds/roots"].max() / 3
    assert mixed["seconds/factors"].max() == plain["seconds/factors"].max()
    by_rule = plan_model(model, {}, some, RATES, CUDA).amounts
    assert by_rule["seconds/roots"].max() == mixed["seconds/roots"].max()
    assert by_rule["workspace"].max() == mixed["workspace"].max() > plain["workspace"].max() / 2


def test_choices_are_plans_with_their_options() -> None:
    model, some = meta_model(SIZES["llama-18m"]), Ranks(2, 1)
    found = list(choices(model, {"update_every": 5, "momentum": 0.9}, some, RATES, CUDA))
    assert len(found) == len(set(found)) == 5 * 2 * 4
    for choice in found[::7]:
        own_options = {name: getattr(choice, name) for name in ("block_size", "state_dtype", "update_every")}
        single = plan_model(model, {"momentum": 0.9, **own_options}, some, RATES, CUDA)
        assert (choice.memory, choice.seconds, choice.balance) == (single.memory, single.seconds, single.balance)


def test_shards_are_cut_as_torch_cuts_them() -> None:
    for rows in (1, 5, 8, 13):
        for shards in (1, 2, 4, 7, 8):
            sizes = [len(piece) for piece in torch.arange(rows).chunk(shards)]
            sizes += [0] * (shards - len(sizes))
            assert np.diff(Ranks(shards, 1).bounds(rows)).tolist() == sizes


def test_boxes_are_those_of_tiles() -> None:
    given = parameters(jobs.make_model("mixed shapes"), options({"block_size": 8}).defaults)
    from dash_shampoo.layout import cut

    for (parameter, group), own_cut in zip(given, tiles_of(given).cuts, strict=True):
        boxes = [extent(tile) for _, tile, _ in cut(parameter, group)]
        axis = 0 if parameter.ndim == 3 and group["view"] != "matrix" else 1
        assert [(box[axis], box.size // box.shape[axis]) for box in boxes] == [
            ((start, stop), width)
            for start, stop, width in zip(own_cut.start, own_cut.stop, own_cut.width, strict=True)
        ]


def test_the_host_is_what_a_small_model_waits_for() -> None:
    large, small = (plan(size, Ranks(1, 1), update_every=1).amounts for size in ("llama-7b", "tiny"))
    assert large["seconds"].max() > 2 * large["seconds/host"].max()
    assert small["seconds"].max() == small["seconds/host"].max()


def test_a_product_of_a_root_is_counted_by_its_precision_and_what_computes_it() -> None:
    h100, minimax = DEVICES["h100"], Minimax()
    count = products(2, damping=1e-4)
    true, split, mixed, bfloat = (
        of_roots(minimax, 2, 1e-4, precision, h100) for precision in ("fp32", "fp16x3", "mixed", "bf16x3")
    )
    assert true.products == pytest.approx(h100.fp32)
    # The kernel computes what is on and below the diagonal where products are symmetric.
    assert h100.fp16 / 3 < split.products <= h100.fp16 / 3 / LOWER
    assert split.products < mixed.products < h100.fp16 / LOWER
    assert bfloat.products == pytest.approx(h100.fp16 / 3)
    assert bfloat.traffic == pytest.approx((136 * count + 32) / (12 * count + 32))
    assert of_roots(minimax, 2, 1e-4, "fp32", DEVICES["cpu"]).products == pytest.approx(DEVICES["cpu"].fp32)
