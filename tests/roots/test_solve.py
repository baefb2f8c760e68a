"""Every solver computes the same function, within what it promises, whatever comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dash_shampoo.kernels import has_tensor_cores
from dash_shampoo.roots import (
    SCALINGS,
    Chebyshev,
    CoupledNewton,
    Minimax,
    NewtonDB,
    inverse_root,
    products,
    resolve_precision,
    resolve_solver,
    solver_options,
)
from dash_shampoo.roots.solve import vanishing
from tests.roots.matrices import exact_root, relative_error, with_condition, with_spectrum

ACCURATE = ["minimax", "newton-db", "coupled-newton", "eigh"]
SOLVERS = [*ACCURATE, "chebyshev"]


def roots_of(solver: str) -> list[int]:
    return [2, 4, 8] if solver == "newton-db" else [1, 2, 3, 4, 5]


CASES = [(solver, p) for solver in SOLVERS for p in roots_of(solver)]


@pytest.mark.parametrize(("solver", "p"), CASES)
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6, 1e8])
def test_root_is_exact_in_float64(solver: str, p: int, condition: float) -> None:
    damping = 1e-2 if solver == "chebyshev" else 1e-5
    A = with_condition(condition)
    root = inverse_root(A, p, solver=solver, damping=damping)
    assert root.ok.all()
    # The certified error of the schedule or of the iteration, once for p > 1 and twice for the squared root of p = 1.
    assert relative_error(root.value, exact_root(A, p, damping)) < (5e-3 if solver == "chebyshev" else 2e-3)


@pytest.mark.parametrize(("solver", "p"), CASES)
@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_root_is_accurate_in_float32(solver: str, p: int, damping: float) -> None:
    if solver == "chebyshev" and damping < 1e-3:
        solver, damping = "chebyshev", 1e-3
    A = with_condition(1e7, b=40).float()
    root = inverse_root(A, p, solver=solver, damping=damping)
    assert root.value.dtype == torch.float32
    assert root.ok.all()
    assert relative_error(root.value, exact_root(A, p, damping)) < (3e-2 if solver == "chebyshev" else 5e-3)


def test_float32_minimax_at_condition_1e5_is_within_3e_4_of_float64() -> None:
    A = with_condition(1e5, b=128).float()
    root = inverse_root(A, 4, solver="minimax", damping=1e-5)
    assert relative_error(root.value, exact_root(A, 4, 1e-5)) < 3e-4


@pytest.mark.parametrize("solver", SOLVERS)
@given(
    exponent=st.integers(-30, 30),
    p=st.sampled_from([2, 4]),
    condition=st.sampled_from([1.0, 1e3, 1e8]),
    seed=st.integers(0, 100),
)
def test_root_of_a_multiple_is_a_multiple_of_the_root(
    solver: str, exponent: int, p: int, condition: float, seed: int
) -> None:
    A = with_condition(condition, b=12, seed=seed).float()
    scale = 2.0 ** (3 * exponent)  # from 1e-27 to 1e27, without rounding
    one, many = inverse_root(A, p, solver=solver, damping=1e-3), inverse_root(A * scale, p, solver=solver, damping=1e-3)
    assert one.ok.all()
    assert many.ok.all()
    torch.testing.assert_close(many.value * scale ** (1 / p), one.value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("entry", [1e-30, 1e-12, 1e12, 1e30])
def test_entries_from_1e_30_to_1e30_neither_over_nor_underflow(solver: str, entry: float) -> None:
    A = (with_condition(1e4, b=16) * entry).float()
    root = inverse_root(A, 4, solver=solver, damping=1e-2)
    assert root.ok.all()
    assert relative_error(root.value, exact_root(A, 4, 1e-2)) < 5e-3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("rank", [1, 3, 11])
def test_rank_deficient_matrices_are_rooted_on_their_kernel_too(solver: str, p: int, rank: int) -> None:
    values = torch.zeros(12)
    values[:rank] = torch.linspace(1, 0.1, rank)
    A = with_spectrum(values)
    root = inverse_root(A, p, solver=solver, damping=1e-2)
    assert root.ok.all()
    assert relative_error(root.value, exact_root(A, p, 1e-2)) < 5e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_matrices_of_one_element(solver: str) -> None:
    A = torch.tensor([1e-20, 1.0, 4.0, 1e20]).view(4, 1, 1)
    root = inverse_root(A, 2, solver=solver, damping=1e-2)
    torch.testing.assert_close(root.value, (A * 1.01) ** -0.5, rtol=5e-3, atol=0)
    assert root.ok.all()


@pytest.mark.parametrize("solver", [*SOLVERS, "newton-db-paper", "coupled-newton-paper"])
def test_zero_matrix_has_a_finite_root(solver: str) -> None:
    A = torch.zeros(2, 5, 5)
    A[1] = torch.eye(5)
    root = inverse_root(A, 4, solver=solver, damping=1e-2)
    assert root.ok.all()
    assert torch.equal(root.value[0], torch.eye(5))
    root = inverse_root(A, 4, solver=solver, damping=1e-2, epsilon=1e-4)
    torch.testing.assert_close(root.value[0], 10 * torch.eye(5))


@pytest.mark.parametrize("solver", [*SOLVERS, "newton-db-paper", "coupled-newton-paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_whose_entries_have_lost_their_digits_is_zero(solver: str, dtype: torch.dtype) -> None:
    limit = vanishing(dtype)
    A = with_condition(10, n=1, b=6).to(dtype)
    A = A / A.diagonal(dim1=1, dim2=2).amax()
    tiny = torch.finfo(dtype).tiny
    scales = torch.tensor([4 * limit, 0.1 * limit, tiny, tiny / 100], dtype=dtype)
    root = inverse_root(A * scales.view(-1, 1, 1), 2, solver=solver, damping=1e-2)
    assert root.ok.all()
    assert relative_error(root.value[:1], exact_root(A * 4 * limit, 2, 1e-2)) < 5e-3
    assert torch.equal(root.value[1:], torch.eye(6, dtype=dtype).expand(3, 6, 6))
    assert not root.residual[1:].any()
    # With an absolute damping that is larger, a small matrix counts.
    small = inverse_root(A * 1e-6, 2, solver=solver, damping=1e-2, epsilon=1e-6)
    assert relative_error(small.value, exact_root(A * 1e-6, 2, 1e-2, 1e-6)) < 5e-3


@pytest.mark.parametrize("solver", [*SOLVERS, "newton-db-paper", "coupled-newton-paper"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_matrix_touches_no_other(solver: str, bad: float) -> None:
    A = with_condition(1e3, n=4).float()
    clean = inverse_root(A, 4, solver=solver, damping=1e-2)
    A[2, 1, 1] = bad
    previous = torch.full_like(A, 7.0)
    root = inverse_root(A, 4, solver=solver, damping=1e-2, previous=previous)
    assert root.ok.tolist() == [True, True, False, True]
    assert torch.equal(root.value[2], previous[2])
    torch.testing.assert_close(root.value[root.ok], clean.value[root.ok])
    assert torch.isfinite(inverse_root(A, 4, solver=solver, damping=1e-2).value).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("corner", [(0, 1), (3, 3)])
def test_a_nan_anywhere_is_caught(solver: str, corner: tuple[int, int]) -> None:
    A = with_condition(1e3, b=6, n=2).float()
    A[0][corner] = A[0].T[corner] = float("nan")
    assert inverse_root(A, 4, solver=solver, damping=1e-2).ok.tolist() == [False, True]


def test_a_matrix_that_is_not_positive_semidefinite_is_flagged() -> None:
    A = with_spectrum(torch.tensor([1.0, 0.5, -0.9, 0.1]), n=2).float()
    root = inverse_root(A, 4, damping=1e-3)
    assert not root.ok.any()
    assert torch.isfinite(root.value).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 0)])
def test_empty_stacks(solver: str, shape: tuple[int, int, int]) -> None:
    root = inverse_root(torch.zeros(shape), 4, solver=solver, damping=1e-2)
    assert root.value.shape == shape
    assert root.ok.shape == root.residual.shape == shape[:1]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_serves_every_solver(solver: str, scaling: str) -> None:
    if scaling.startswith("paper"):
        pytest.skip("twice an estimate is no bound: the paper's form is tested in test_paper.py")
    A = with_condition(1e6)
    root = inverse_root(A, 4, solver=solver, scaling=scaling, damping=1e-2)
    assert root.ok.all()
    assert relative_error(root.value, exact_root(A, 4, 1e-2)) < 2e-2


def test_epsilon_is_absolute_damping() -> None:
    A = 100 * with_condition(1e3)
    for solver in ("eigh", "minimax"):
        root = inverse_root(A, 4, solver=solver, damping=1e-4, epsilon=5.0)
        assert relative_error(root.value, exact_root(A, 4, 1e-4, 5.0)) < 1e-3


def test_eigh_without_damping_is_the_pure_root() -> None:
    A = with_condition(1e5)
    root = inverse_root(A, 4, solver="eigh", damping=0.0)
    torch.testing.assert_close(torch.linalg.matrix_power(root.value, 4) @ A, torch.eye(24).double().expand(3, -1, -1))


@pytest.mark.parametrize("solver", [*ACCURATE, "chebyshev"])
def test_pieces_give_the_same_roots(solver: str) -> None:
    A = with_condition(1e4, n=7).float()
    previous = torch.ones_like(A)
    whole = inverse_root(A, 4, solver=solver, damping=1e-2, previous=previous)
    pieces = inverse_root(A, 4, solver=solver, damping=1e-2, previous=previous, max_workspace=8 * 2 * A[0].nbytes)
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_input_is_not_changed_and_may_be_a_slice() -> None:
    wide = torch.zeros(3, 30, 24)
    wide[:, 3:27] = with_condition(1e4).float()
    A = wide[:, 3:27]
    before = A.clone()
    for solver in SOLVERS:
        root = inverse_root(A, 4, solver=solver, damping=1e-2)
        torch.testing.assert_close(root.value, inverse_root(before, 4, solver=solver, damping=1e-2).value)
        assert torch.equal(A, before)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_global_random_numbers_are_untouched(solver: str, scaling: str) -> None:
    state = torch.get_rng_state()
    inverse_root(with_condition(1e2), 2, solver=solver, scaling=scaling, damping=1e-2)
    assert torch.equal(torch.get_rng_state(), state)


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "chebyshev", "newton-db-paper"])
def test_nothing_waits_for_the_device(solver: str) -> None:
    A = with_condition(1e2)
    with Record() as record:
        inverse_root(A, 4, solver=solver, damping=1e-2, previous=A)
    assert "aten::bmm" in record.names
    assert not record.names & {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ACCURATE)
@pytest.mark.parametrize("p", [2, 4])
def test_the_residual_estimates_what_it_says(solver: str, p: int) -> None:
    A = with_condition(1e4, b=60, n=2)
    root = inverse_root(A, p, solver=solver, damping=1e-3)
    damped = exact_root(A, -1, 1e-3)
    true = torch.linalg.matrix_norm(torch.linalg.matrix_power(root.value, p) @ damped - torch.eye(60).double())
    assert (root.residual > 0.5 * true - 1e-9).all()
    assert (root.residual < 2 * true + 1e-9).all()


def test_a_wrong_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_direction(self: Minimax, scaled: Any, *rest: Any) -> Tensor:
        values, vectors = torch.linalg.eigh(scaled.matrix)
        values[:, 0] *= 64
        return (vectors * values.pow(-0.25).unsqueeze(1)) @ vectors.mT

    monkeypatch.setattr(Minimax, "solve", off_by_a_direction)
    A = with_condition(1e4, b=200, n=4)
    previous = torch.zeros_like(A)
    root = inverse_root(A, 4, damping=1e-4, previous=previous)
    assert not root.ok.any()
    assert torch.equal(root.value, previous)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0}, "positive integer"),
        ({"p": 1.5}, "positive integer"),
        ({"damping": -1.0}, "damping"),
        ({"damping": 0.0}, r"\[1e-08, 1\].*eigh"),
        ({"damping": 1e-9}, r"\[1e-08, 1\]"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"solver": "minmax"}, "did you mean 'minimax'"),
        ({"solver": {"name": "minimax", "order": 2}}, "fields degree, tolerance"),
        ({"solver": Minimax(degree=4)}, "degree 1, 2 or 3"),
        ({"solver": Minimax(tolerance=0.0)}, "tolerance"),
        ({"solver": "newton-db", "p": 3}, "minimax"),
        ({"solver": "newton-db", "damping": 0.0}, "steps"),
        ({"solver": "coupled-newton", "damping": 0.0}, "steps"),
        ({"solver": "chebyshev", "damping": 0.0}, "damping > 0"),
        ({"solver": Chebyshev(degree=0)}, "degree"),
        ({"solver": Chebyshev(evaluation="horner")}, "clenshaw"),
        ({"scaling": "trace"}, "unknown scaling"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"precision": "bf16"}, "bf16x3"),
        ({"precision": "fp16", "damping": 1e-5}, "fp16x3"),
        ({"precision": "fp16x3", "damping": 1e-7}, "precision='fp32'"),
    ],
)
def test_bad_options_are_refused_with_what_would_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inverse_root(torch.eye(3).expand(2, 3, 3), **{"p": 4, **options})


def test_bad_stacks_are_refused() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        inverse_root(torch.eye(3).bfloat16().expand(2, 3, 3), 4)
    with pytest.raises(ValueError, match=r"\(n, b, b\)"):
        inverse_root(torch.eye(3), 4)
    with pytest.raises(ValueError, match=r"\(n, b, b\)"):
        inverse_root(torch.zeros(2, 3, 4), 4)


def test_solvers_survive_the_trip_through_plain_values() -> None:
    assert solver_options("newton-db") == "newton-db"
    for solver in (
        Minimax(),
        Minimax(degree=3, tolerance=0.1),
        NewtonDB(steps=7),
        CoupledNewton(),
        Chebyshev(degree=9),
    ):
        assert resolve_solver(solver_options(solver)) == solver


# --- precision="auto" -------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Has torch say that there is a GPU of a compute capability."""

    def there_is(capability: tuple[int, int]) -> None:
        has_tensor_cores.cache_clear()
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield there_is
    has_tensor_cores.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tensor_cores_take_mixed_products_where_they_are_safe(a_gpu: Any, capability: tuple[int, int]) -> None:
    a_gpu(capability)
    chosen = {
        (name, p, damping): resolve_precision("auto", resolve_solver(name), p, damping, GPU)
        for name in (*SOLVERS, "newton-db-paper")
        for p in (1, 2, 4)
        for damping in (1e-2, 1e-4, 1e-6, 1e-7, 0.0)
    }
    for (name, p, damping), precision in chosen.items():
        if name in ("eigh", "newton-db-paper") or damping < 1e-6:
            assert precision == "fp32"
        elif p > 1 or damping == 1e-2:
            assert precision == "mixed"
        else:
            assert precision == ("fp16x3" if damping == 1e-4 else "fp32")
    assert resolve_precision("bf16x3", Minimax(), 4, 1e-4, GPU) == "bf16x3"


def test_what_auto_takes_is_never_refused() -> None:
    """For every device: on this one the products are emulated."""
    for solver in ("minimax", "newton-db", "coupled-newton"):
        for p in (1, 2, 3, 4, 8):
            for damping in (1e-1, 1e-2, 1e-3, 1e-4, 2e-5, 1e-6):
                precision = resolve_precision("auto", resolve_solver(solver), p, damping, GPU)
                try:
                    inverse_root(torch.eye(3).unsqueeze(0), p, solver=solver, damping=damping)
                except ValueError:  # not in float32 either
                    continue
                assert inverse_root(
                    torch.eye(3).unsqueeze(0), p, solver=solver, damping=damping, precision=precision
                ).ok


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (6, 1)])
def test_older_gpus_take_float32(a_gpu: Any, capability: tuple[int, int]) -> None:
    a_gpu(capability)
    assert resolve_precision("auto", Minimax(), 2, 1e-4, GPU) == "fp32"


def test_amd_gpus_take_float32(a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu((9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert resolve_precision("auto", Minimax(), 2, 1e-4, GPU) == "fp32"


def test_a_cpu_takes_float32_and_float64_stays_what_it_is() -> None:
    assert resolve_precision("auto", Minimax(), 2, 1e-4, torch.device("cpu")) == "fp32"
    for dtype in (torch.float32, torch.float64):
        A = with_condition(1e3, b=13).to(dtype)
        assert torch.equal(inverse_root(A, 4).value, inverse_root(A, 4, precision="fp32").value)


@pytest.mark.parametrize(("condition", "most"), [(1e3, 11), (1e4, 16), (1e5, 21), (1e6, 26)])
def test_products_of_a_fourth_root(condition: float, most: int) -> None:
    assert products(4, damping=1 / condition) == most


def test_products_of_the_paper_s_newton_db() -> None:
    """Two coupled square roots of ten steps with three products each, less three that are not needed, and |A|'s.

    Those of the power iteration have a thin factor, and do not count.
    """
    assert products(4, solver="newton-db-paper", damping=0.0) == 2 * (3 * 10 - 3) + 1
    with pytest.raises(ValueError, match="damping"):
        products(4, damping=0.0)
