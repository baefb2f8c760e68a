"""What the processes of the tests do, and models and gradients that are the same in each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash, param_groups, renewals
from dash_shampoo.blocks import as_stack
from dash_shampoo.parallel import world
from dash_shampoo.parallel.boxes import local, placement
from dash_shampoo.parallel.world import World
from tests.quantised import Int8Weight

OPTIONS: dict[str, Any] = {"lr": 0.05, "block_size": 8, "update_every": 2, "weight_decay": 0.1, "damping": 1e-3}


class Model(nn.Module):
    """Matrices with remainders, a convolution, vectors, an embedding and parameters smaller than the world."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 12)
        self.wide = nn.Linear(12, 36)
        self.convolution = nn.Conv1d(3, 5, 3)
        self.norm = nn.LayerNorm(60)
        self.narrow = nn.Linear(60, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.wide(self.embedding(tokens))).unflatten(-1, (3, 12))  # (batch, 3, 12)
        x = self.convolution(x)  # (batch, 5, 10)
        x = x.reshape(len(tokens), -1)
        out: Tensor = self.narrow(self.norm(torch.cat([x, x[:, :10]], dim=1))) * self.scale
        return out


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(7)
    return Model(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(19, (24,), generator=generator), torch.randn(24, 2, generator=generator)


def gradients(step: int, model: nn.Module) -> list[Tensor]:
    """A gradient for each parameter, whole, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def give(
    model: nn.Module,
    step: int,
    missing: Callable[[int, int], bool] = lambda *_: False,
    zero: Callable[[int, int], bool] = lambda *_: False,
) -> None:
    """Gives each parameter its part of the step's gradient, but those that ``missing(step, index)`` names.

    Those that ``zero(step, index)`` names get a gradient of zeros.
    """
    for i, (parameter, gradient) in enumerate(zip(model.parameters(), gradients(step, model), strict=True)):
        gradient.mul_(not zero(step, i))
        if missing(step, i):
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        else:
            parameter.grad = gradient


def prepare(model: nn.Module, strategy: str) -> nn.Module:
    """The model as a strategy holds it: "alone", "replicated", "fsdp", "hsdp" or "mixed"."""
    if strategy == "fsdp":
        return fully_shard(model)
    if strategy == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
        )
    if strategy == "mixed":
        for module in (model.wide, model.convolution):
            fully_shard(module)
    return model


@mock.patch.object(renewals, "LEAST", 0.0)
def steps(
    strategy: str,
    count: int,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    missing: Callable[[int, int], bool] = lambda *_: False,
    zero: Callable[[int, int], bool] = lambda *_: False,
) -> list[Tensor]:
    """The parameters after some steps with given gradients; roots are renewed in turns, as in large models."""
    model = prepare(make_model(dtype), strategy)
    optimizer = Dash(param_groups(model), **{**OPTIONS, **(options or {})})
    for step in range(count):
        give(model, step, missing, zero)
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def train_ddp(count: int) -> list[Tensor]:
    """The parameters after training with DistributedDataParallel on shards of the batches."""
    return _train(DistributedDataParallel(make_model()), count, dist.get_rank(), dist.get_world_size())


def train_fsdp(count: int) -> list[Tensor]:
    """The parameters after training with fully_shard on shards of the batches."""
    model = make_model()
    for module in (model.wide, model.convolution, model):
        fully_shard(module)
    return _train(model, count, dist.get_rank(), dist.get_world_size())


def train_alone(count: int) -> list[Tensor]:
    """The parameters after training on the whole batches."""
    return _train(make_model(), count, 0, 1)


def _train(
    model: nn.Module, count: int, rank: int, size: int, draw: Callable[[int], tuple[Tensor, Tensor]] = batch
) -> list[Tensor]:
    """The parameters after training on one of ``size`` parts of each batch."""
    optimizer = Dash(model.parameters(), **OPTIONS)
    for step in range(count):
        inputs, targets = (part.chunk(size)[rank] for part in draw(step))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def later_and_later(step: int, index: int) -> bool:
    """Each parameter begins a step after the one before it, and is idle at step 4."""
    return step < index % 4 or step == 4


def never_first_two(step: int, index: int) -> bool:
    """Missing everywhere: one matrix at the first two steps, another at every third."""
    return (index == 1 and step < 2) or (index == 2 and step % 3 == 1)


def on_some_ranks(step: int, index: int) -> bool:
    """Missing on the last process at the second step."""
    return step == 1 and index in (1, 3) and dist.get_rank() == dist.get_world_size() - 1


def refused_gradients(nan: bool) -> list[Any]:
    """Whether nothing moved at three steps; before that of the second its error, since the last process lacks some."""
    model = prepare(make_model(), "replicated")
    optimizer = Dash(model.named_parameters(), **OPTIONS, on_nonfinite="raise")
    found: list[Any] = []
    for step in range(3):
        before = [whole(parameter) for parameter in model.parameters()]
        give(model, step, on_some_ranks)
        if nan and step == 1:
            list(model.parameters())[2].grad.fill_(torch.nan)
        try:
            optimizer.step()
        except FloatingPointError as caught:
            found.append(str(caught))
        found.append(all(map(torch.equal, before, [whole(parameter) for parameter in model.parameters()])))
    return found


def partly_missing(strategy: str) -> dict[str, Any]:
    """Steps with gradients that the last process lacks: what moved, and what the optimizer says of it."""
    model = prepare(make_model(), strategy)
    optimizer = Dash(model.parameters(), **OPTIONS)
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for step in range(3):
            before = [whole(parameter) for parameter in model.parameters()]
            give(model, step, on_some_ranks)
            optimizer.step()
            after = [whole(parameter) for parameter in model.parameters()]
            moved.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    return {
        "moved": moved,
        "parameters": [whole(parameter) for parameter in model.parameters()],
        "skipped": optimizer.diagnostics()["skipped"],
        "ages": [optimizer.state_dict()["state"][i]["age"] for i in range(len(moved[0]))],
    }


def not_finite(strategy: str, on_nonfinite: str) -> dict[str, Any]:
    """A step with a NaN in one process's part of one gradient."""
    model = prepare(make_model(), strategy)
    optimizer = Dash(model.parameters(), **OPTIONS, on_nonfinite=on_nonfinite)
    give(model, 0)
    optimizer.step()
    before = [whole(parameter) for parameter in model.parameters()]
    give(model, 1)
    if dist.get_rank() == 1:
        local(list(model.parameters())[2].grad).fill_(torch.nan)
    error = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except FloatingPointError as caught:
            error = str(caught)
    after = [whole(parameter) for parameter in model.parameters()]
    give(model, 2)
    optimizer.step()
    return {
        "error": error,
        "warned": [str(each.message) for each in warned],
        "moved": [not torch.equal(a, b) for a, b in zip(before, after, strict=True)],
        "finite": all(bool(whole(parameter).isfinite().all()) for parameter in model.parameters()),
        "skipped": optimizer.diagnostics()["skipped"],
    }


def collectives(strategy: str) -> list[str]:
    """The collectives of a step, after one that has set everything up."""
    model = prepare(make_model(), strategy)
    optimizer = Dash(model.parameters(), **OPTIONS)
    seen: list[str] = []
    for step in range(2):
        give(model, step)
        seen.clear()
        with ExitStack() as stack:
            for name in ("all_reduce", "_all_gather", "all_to_all_single"):
                owner = world if name.startswith("_") else dist
                stack.enter_context(mock.patch.object(owner, name, _recorded(seen, getattr(owner, name), name)))
            optimizer.step()
    return seen


def _recorded(seen: list[str], call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(name)
        return call(*arguments, **options)

    return recorded


def state_size(strategy: str) -> int:
    """Bytes of this process's state, but for the numbers that every process has."""
    model = prepare(make_model(), strategy)
    optimizer = Dash(model.parameters(), **OPTIONS, momentum=0.9)
    give(model, 0)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and "." in key
    )


def few_elements(strategy: str, shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """A parameter with fewer rows, or tiles, than there are processes, after three steps."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64))
    prepare(model, strategy)
    optimizer = Dash(model.parameters(), **{**OPTIONS, **options})
    for step in range(3):
        give(model, step)
        optimizer.step()
    return whole(next(model.parameters()))


def made_too_early(strategy: str) -> list[str]:
    """What Dash warns of when fully_shard replaces parameters it was given."""
    model = make_model()
    optimizer = Dash(model.named_parameters(), **OPTIONS)
    prepare(model, strategy)
    give(model, 0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return [str(each.message) for each in warned]


def bytes_of_gradients(dtype: torch.dtype) -> int:
    """Bytes that this process gives to the exchange of gradients."""
    model = prepare(make_model(dtype), "fsdp")
    optimizer = Dash(model.parameters(), **OPTIONS)
    give(model, 0)
    with mock.patch.object(World, "exchange", autospec=True, side_effect=World.exchange) as exchange:
        optimizer.step()
    return sum(call.args[1].nbytes for call in exchange.call_args_list if call.args[-1] == "the gradients")


def different_models(process_group: Any) -> str:
    """What Dash says when each process trains a model of its own."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(5, 4)
    options = {} if process_group == "auto" else {"process_group": process_group}
    optimizer = Dash(model.named_parameters(), **options)
    give(model, dist.get_rank())
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def boxes_of(shape: tuple[int, ...], sizes: tuple[int, ...], cuts: list[str], view: str) -> bool:
    """Whether `placement` finds what this process holds of a tensor that is cut in this way."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    kinds = {"r": Replicate(), **{str(i): Shard(i) for i in range(len(shape))}}
    full = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    tensor = distribute_tensor(full, mesh, [kinds[cut] for cut in cuts], src_data_rank=None)
    held = placement(tensor, range(dist.get_world_size()), view).boxes[dist.get_rank()]
    return torch.equal(as_stack(local(tensor), view), held.of(as_stack(full, view)))


def two_dimensional(count: int) -> list[Tensor]:
    """Tensor parallelism on one mesh dimension and fully_shard on the other, with real gradients."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = make_perceptron()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return _train(model, count, mesh["data"].get_local_rank(), 2, real_batch)


def one_dimensional(count: int) -> list[Tensor]:
    """The same training on one process."""
    return _train(make_perceptron(), count, 0, 1, real_batch)


def make_perceptron() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 22), nn.Tanh(), nn.Linear(22, 5)).double()


def real_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(24, n, generator=generator, dtype=torch.float64) for n in (6, 5))
    return x, y


def refusal(kind: str) -> str:
    """What Dash says of parameters whose shape is hidden or that are cut in a way it cannot follow."""
    model = nn.Linear(6, 8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp1":
        parameters = FullyShardedDataParallel(model, device_id=torch.device("cpu")).parameters()
    elif kind == "fsdp1 original":
        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        parameters = sharded.parameters()
    elif kind == "third dimension":
        cut = distribute_tensor(torch.randn(2, 3, 4, 4), mesh, [Shard(2)], src_data_rank=None)
        parameters = iter([nn.Parameter(cut)])
    elif kind == "partial":
        parameters = iter([nn.Parameter(DTensor.from_local(torch.randn(2, 3), mesh, [Partial()]))])
    else:
        raise AssertionError(kind)
    try:
        Dash(parameters)
    except TypeError as error:
        return str(error)
    return "taken"


def experts(cuts: list[int], sizes: tuple[int, ...], replicas: int) -> bool:
    """Whether experts in one parameter, cut along these dimensions, move to the bit as separate replicas do."""
    names = ("a", "b", "c")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    kinds = [Replicate()] * replicas + [Shard(cut) for cut in cuts]
    generator = torch.Generator().manual_seed(0)
    start, *given = (torch.randn(4, 12, 10, generator=generator) for _ in range(4))

    def held(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, kinds, src_data_rank=None) if kinds else tensor.clone()

    stack = nn.Parameter(held(start))
    separate = [nn.Parameter(each.clone()) for each in start]
    one, many = (Dash(parameters, **{**OPTIONS, "block_size": 6}) for parameters in ([stack], separate))
    for gradient in given:
        stack.grad = held(gradient)
        for parameter, own in zip(separate, gradient, strict=True):
            parameter.grad = own.clone()
        one.step()
        many.step()
    return torch.equal(whole(stack), torch.stack([each.detach() for each in separate]))


def quantised_steps(strategy: str, steps: int) -> list[Tensor]:
    """The values of int8 weights after some steps: replicated, cut along rows as `fully_shard` does, or alone."""
    shapes = [(16, 8), (24, 20), (9,)]
    mesh = None if strategy == "alone" else init_device_mesh("cpu", (dist.get_world_size(),))
    kind: Any = Shard(0) if strategy == "fsdp" else Replicate()
    weights = []
    for i, shape in enumerate(shapes):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        if mesh is not None:
            values = distribute_tensor(values, mesh, [kind]).to_local()
        own: Any = Int8Weight.of(values)
        if mesh is not None and strategy == "fsdp":
            own = DTensor.from_local(own, mesh, [kind], shape=torch.Size(shape), stride=torch.empty(shape).stride())
        weights.append(nn.Parameter(own))
    optimizer = Dash(weights, **OPTIONS)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for weight, shape in zip(weights, shapes, strict=True):
            gradient = torch.randn(shape, generator=generator)
            sharded = isinstance(weight, DTensor)
            weight.grad = distribute_tensor(gradient, mesh, [kind]) if sharded else gradient
        optimizer.step()
    found = []
    for weight in weights:
        held = local(weight)
        values = torch.empty(held.shape).copy_(held.detach())
        if isinstance(weight, DTensor):
            values = DTensor.from_local(values, mesh, [kind], shape=weight.shape, stride=weight.stride()).full_tensor()
        found.append(values)
    return found
