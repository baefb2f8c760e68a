"""What stands in `optimizer.state` is the truth: entries can be moved, replaced, saved and let go one by one."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction as standard
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dash_shampoo import Dash
from dash_shampoo.slabs import Slab, Slot
from tests.test_checkpoint import through_a_file
from tests.test_contract import SHAPES, assert_same_state, run, snapshot
from tests.test_optimizer import CountOperations, parameters


def twins(count: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[tuple[Dash, list[nn.Parameter]]]:
    """Equal runs that have taken three steps, with entries of several shapes and kinds."""
    found = []
    for _ in range(count):
        params = parameters([*SHAPES, (9, 7)], dtype)
        optimizer = Dash([(f"w{i}", p) for i, p in enumerate(params)], lr=0.01, block_size=4, update_every=2, **options)
        run(optimizer, params, range(3))
        found.append((optimizer, params))
    return found


def tensors(optimizer: Dash) -> list[tuple[dict[str, Any], str]]:
    """The places of all tensors in the state."""
    return [(own, key) for own in optimizer.state.values() for key, value in own.items() if isinstance(value, Tensor)]


def memory(optimizer: Dash) -> list[StorageWeakRef]:
    """The memory of the stacks."""
    found = []
    for bank in optimizer._banks:
        for slab in bank.slabs:
            assert slab.open()
            found.append(StorageWeakRef(slab.tensor.untyped_storage()))
            slab.close()
    return found


# --- what users do to entries -----------------------------------------------------------------------------------------


def replace(state: dict[str, Any], key: str) -> None:
    state[key] = state[key].clone()


def swap_data(state: dict[str, Any], key: str) -> None:
    state[key].data = state[key].data.clone()


def share(state: dict[str, Any], key: str) -> None:
    state[key].share_memory_()


def leave(state: dict[str, Any], key: str) -> None:
    state[key] = state[key].detach()


def set_memory(state: dict[str, Any], key: str) -> None:
    state[key].set_(state[key].clone())


MOVES = [replace, swap_data, share, leave, set_memory]
KINDS: dict[str, Any] = {
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    "grafting": st.sampled_from(["adam", "sgd"]),
    "vectors": st.sampled_from(["adamw", "shampoo"]),
    "momentum": st.sampled_from([0.0, 0.9]),
    "state_dtype": st.sampled_from(["fp32", "bf16"]),
}


@given(data=st.data(), options=st.fixed_dictionaries(KINDS))
def test_entries_that_are_moved_go_on_to_the_bit(data: st.DataObject, options: dict[str, Any]) -> None:
    (optimizer, params), (other, others) = twins(2, **options)
    for step in range(3, 6):
        places = tensors(optimizer)
        chosen = data.draw(st.sets(st.integers(0, len(places) - 1)) | st.just(set(range(len(places)))))
        move = data.draw(st.sampled_from(MOVES))
        for i in chosen:
            move(*places[i])
        assert_same_state(snapshot(optimizer), snapshot(other))
        run(optimizer, params, range(step, step + 1))
        run(other, others, range(step, step + 1))
        assert all(torch.equal(one, twin) for one, twin in zip(params, others, strict=True))
        assert_same_state(snapshot(optimizer), snapshot(other))


def halve(value: Tensor) -> Tensor:
    return value if value.dtype == torch.bool else value / 2 if value.is_floating_point() else value // 2


def write(state: dict[str, Any], key: str) -> None:
    state[key].copy_(halve(state[key]))


def put(state: dict[str, Any], key: str) -> None:
    state[key] = halve(state[key])


def put_data(state: dict[str, Any], key: str) -> None:
    state[key].data = halve(state[key])


def put_in_another_dtype(state: dict[str, Any], key: str) -> None:
    own = state[key]
    state[key] = halve(own).double() if own.is_floating_point() else halve(own)


@given(
    change=st.sampled_from([write, put, put_data, put_in_another_dtype]),
    part=st.sampled_from(["step", "skipped", "moment", "statistic", "left", "failed", ""]),
    options=st.fixed_dictionaries(KINDS),
)
def test_new_values_are_those_of_the_next_step_and_of_the_next_file(
    change: Callable[..., None], part: str, options: dict[str, Any]
) -> None:
    (optimizer, params), (other, others) = twins(2, **options)
    for own, key in tensors(optimizer):
        if part in key:
            change(own, key)
    state = copy.deepcopy(other.state_dict())
    for own in state["state"].values():
        for key, value in own.items():
            if isinstance(value, Tensor) and part in key:
                own[key] = halve(value)
    other.load_state_dict(state)
    assert_same_state(list(through_a_file(optimizer.state_dict())["state"].values()), snapshot(other))
    run(optimizer, params, range(3, 6))
    run(other, others, range(3, 6))
    assert all(torch.equal(one, twin) for one, twin in zip(params, others, strict=True))
    assert_same_state(snapshot(optimizer), snapshot(other))


def test_states_that_parameters_exchange_are_exchanged() -> None:
    (optimizer, params), (other, _) = twins(2)
    first, last = params[0], params[-1]
    optimizer.state[first], optimizer.state[last] = optimizer.state[last], optimizer.state[first]
    run(optimizer, params, range(0))
    for parameter in params:
        parameter.grad = None
    params[1].grad = torch.zeros_like(params[1])
    optimizer.step()
    expected = snapshot(other)
    assert_same_state([snapshot(optimizer)[0], snapshot(optimizer)[-1]], [expected[-1], expected[0]])


@pytest.mark.parametrize("give", [lambda state, _: state, lambda _, optimizer: optimizer.state_dict()])
def test_a_state_with_entries_under_other_names_is_loaded_as_it_reads(give: Any) -> None:
    """Values may lie in the very memory that they are to be written to."""
    ((optimizer, _),) = twins(1)
    state = give(copy.deepcopy(optimizer.state_dict()), optimizer)
    states = {i: dict(own) for i, own in state["state"].items()}
    states[0], states[4] = states[4], states[0]
    states[2]["tile0.moment"] = states[2]["tile0.moment"].mT
    expected = copy.deepcopy(states)
    optimizer.load_state_dict({**state, "state": states})
    assert_same_state(list(optimizer.state_dict()["state"].values()), [expected[i] for i in range(5)])


# --- what is let go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [replace, swap_data, share, set_memory])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_is_free_as_soon_as_no_entry_has_it(move: Callable[..., None], dtype: torch.dtype) -> None:
    ((optimizer, params),) = twins(1, dtype, momentum=0.9)
    run(optimizer, params, range(3, 5))
    kept = memory(optimizer)
    for parameter in params:  # without a reference to any entry
        for key in [key for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)]:
            move(optimizer.state[parameter], key)
    assert all(each.expired() for each in kept)
    run(optimizer, params, range(5, 7))
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 3, dtype=dtype)))]})
    params = [*params, optimizer.param_groups[1]["params"][0]]
    run(optimizer, params, range(7, 8))  # the stacks of others are kept
    kept = memory(optimizer)
    optimizer.state.clear()
    assert all(each.expired() for each in kept)


def test_an_entry_that_a_user_keeps_keeps_its_values() -> None:
    ((optimizer, params),) = twins(1)
    old = optimizer.state[params[0]]["tile0.moment"]
    values = old.clone()
    for own, key in tensors(optimizer):
        replace(own, key)
    run(optimizer, params, range(3, 5))
    assert torch.equal(old, values)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.update({"tile0.moment": torch.zeros(3)}), r"w0 does not fit: tile0.moment is \(3,\)"),
        (lambda own: own.update({"tile0.moment": None}), "w0 does not fit: tile0.moment is None"),
        (lambda own: own.update({"tile0.left": own["tile0.left"].to("meta")}), "w0 .*tile0.left is on the meta device"),
        (lambda own: own.update({"step": "2"}), "w0 does not fit: step is '2'"),
        (lambda own: own.pop("tile0.moment"), "w0 lacks tile0.moment"),
        (lambda own: own.pop("age"), "w0 lacks age"),
        (lambda own: own.pop("skipped"), "w0 lacks skipped"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_name_before_anything_moves(change: Any, message: str) -> None:
    ((optimizer, params),) = twins(1)
    state, before = snapshot(optimizer), [parameter.detach().clone() for parameter in params]
    own = optimizer.state[params[0]]
    good = dict(own)
    change(own)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            run(optimizer, params, range(3, 4))
    own.update(good)
    assert all(torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True))
    assert_same_state(state, snapshot(optimizer))
    ((other, others),) = twins(1)
    run(optimizer, params, range(3, 5))
    run(other, others, range(3, 5))
    assert all(torch.equal(one, twin) for one, twin in zip(params, others, strict=True))


def test_counts_may_be_replaced_by_numbers() -> None:
    (optimizer, params), (other, others) = twins(2)
    for own in optimizer.state.values():
        own.update(step=float(own["step"]), skipped=int(own["skipped"]), age=torch.tensor(own["age"]))
    assert optimizer.diagnostics() == other.diagnostics()
    run(optimizer, params, range(3, 5))
    run(other, others, range(3, 5))
    assert_same_state(snapshot(optimizer), snapshot(other))


# --- what is sent -----------------------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def copied(value: Any) -> bytes:
    """As many bytes as a deep copy's storages have."""
    entries = [entry for entry in torch.utils._pytree.tree_leaves(copy.deepcopy(value)) if isinstance(entry, Tensor)]
    return bytes(sum(entry.untyped_storage().nbytes() for entry in entries))


@pytest.mark.parametrize("send", [pickle.dumps, saved, copied])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [2, 20])
def test_whatever_is_sent_is_as_large_as_its_entries(
    send: Callable[[Any], bytes], state_dtype: str, layers: int
) -> None:
    params = parameters([(32, 32), (32,)] * layers, torch.float32)
    optimizer = Dash(params, block_size=16, momentum=0.9, state_dtype=state_dtype, vectors="shampoo")
    run(optimizer, params, range(2))
    state = optimizer.state_dict()
    for part in (state, state["state"][0], state["state"][1], *state["state"][0].values()):
        entries = [entry for entry in torch.utils._pytree.tree_leaves(part) if isinstance(entry, Tensor)]
        size = sum(entry.nbytes for entry in entries)
        assert size <= len(send(part)) <= size + 2048 * (1 + len(entries))


def test_a_state_may_be_given_to_another_process_in_shared_memory() -> None:
    (optimizer, params), (other, others) = twins(2)
    standard.ForkingPickler.dumps(optimizer.state_dict())  # as a queue of torch.multiprocessing does
    run(optimizer, params, range(3, 6))
    run(other, others, range(3, 6))
    assert all(torch.equal(one, twin) for one, twin in zip(params, others, strict=True))


# --- slabs alone ------------------------------------------------------------------------------------------------------


@given(
    lanes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    shape=st.lists(st.integers(0, 3), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64]),
)
def test_entries_share_memory_with_a_slab_in_storages_of_their_own(
    lanes: list[int], shape: list[int], dtype: torch.dtype
) -> None:
    slots = [Slot(0, str(i), count) for i, count in enumerate(lanes)]
    slab = Slab(slots, shape, dtype, torch.device("cpu"))
    state: dict[str, Any] = {}
    slab.take([state], {})
    assert slab.holds([state])
    for slot in slots:
        entry = state[slot.key]
        assert entry.shape == slab.shape_of(slot)
        assert entry.untyped_storage().nbytes() == entry.nbytes
        entry.fill_(1)
    assert (slab.tensor == 1).all()
    slab.close()
    assert slab.holds([state])


def test_checking_that_the_state_is_ours_is_no_operation_of_torch() -> None:
    ((optimizer, _),) = twins(1)
    (bank,) = optimizer._banks
    states = [optimizer.state[parameter] for parameter in bank.parameters]
    with CountOperations() as count:
        assert bank.holds(states)
    bank.close()
    assert count.counts == {}


def test_entries_that_are_made_in_inference_mode_are_taken() -> None:
    (optimizer, params), (other, others) = twins(2)
    with torch.inference_mode():
        for own, key in tensors(optimizer):
            own[key] = own[key].clone()
    run(optimizer, params, range(3, 6))
    run(other, others, range(3, 6))
    assert all(torch.equal(one, twin) for one, twin in zip(params, others, strict=True))
