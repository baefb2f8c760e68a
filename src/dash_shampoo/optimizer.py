"""Dash: Shampoo whose blocks are stacked over all layers and whose inverse roots are matrix products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from dash_shampoo import diagnostics, shampoo
from dash_shampoo.bookkeeping import (
    ages,
    count_gradients,
    refuse_nonfinite,
    signature,
    taking_part,
    warn_of_stale_parameters,
)
from dash_shampoo.checkpoint import match, release, take_over
from dash_shampoo.names import names
from dash_shampoo.options import (
    check_process_group,
    is_as_before,
    make_plain,
    normalise,
    refuse_misspelt,
    snapshot,
    wire,
)
from dash_shampoo.parallel.agreement import Agreement
from dash_shampoo.parallel.census import Survey
from dash_shampoo.parallel.full_state import REMEDIES, Consolidated, asked, gather, refuse_mixture
from dash_shampoo.parallel.ownership import Ownership
from dash_shampoo.parallel.world import Worlds
from dash_shampoo.parameters import check_parameters, has_matrices, refuse_duplicates, refuse_flattened
from dash_shampoo.stacks import Bank, arrange


class Dash(Optimizer):
    """Shampoo with stacked blocks and inverse roots by matrix products (arXiv 2602.02016).

    For each block G (r x c) of a matrix of a parameter's gradient:

        L <- beta2 L + (1 - beta2) G G^T        R <- beta2 R + (1 - beta2) G^T G        M <- beta1 M + (1 - beta1) G
        U  = (L + damping)^(-1/p) M (R + damping)^(-1/p)           the roots renewed every ``update_every`` steps
        W <- (1 - lr weight_decay) W - lr U ||step||_F / ||U||_F     ``step`` is what the grafting method would do alone

    Blocks of one shape, dtype and device go through each line in one batched call, whatever layers they come from.
    Every option may be set per parameter group, and is read at each step. State is kept in float32, in float64 for
    float64 parameters; see ``state_dtype``.

    Args:
        params: parameters, named parameters or groups, as for any `torch.optim.Optimizer`; see `param_groups`.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the gradient's mean M and of the factors L and R.
        weight_decay: decoupled weight decay, as in AdamW.
        block_size: largest rows and columns of a block. Larger blocks precondition more, and cost their cube.
        solver: how inverse roots are computed: a name or a solver of `dash_shampoo.roots`.
        update_every: steps between two renewals of a tile's roots, after the first, which all have at once; tiles take
            turns, so that steps are about equally long.
        damping: added to a factor before its root, relative to the bound ||L^2||_F^(1/2) of its largest eigenvalue.
        epsilon: added to a factor before its root, absolute (the paper's form of damping).
        precision: of the products that make roots, one of `dash_shampoo.kernels.PRECISIONS`; "auto" is "mixed" on
            GPUs with tensor cores where the damping allows it, float32 elsewhere.
        grafting: method that lends each block its norm: "adam", "rmsprop", "adagrad", "sgd" or "none".
        graft_beta2: decay of the grafting method's squares; ``None`` is ``betas[1]``.
        graft_eps: added to the grafting method's denominator, and to AdamW's. With 0, entries without gradients stay.
        momentum: momentum of the update, 0 for none.
        nesterov: look ahead along that momentum.
        root: the p of the inverse p-th roots. 2 trains best where we looked (docs/choices.md); ``None`` is the paper's
            rule, twice the number of preconditioned sides: 4 for a matrix, 2 for a one-sided vector.
        vectors: what moves vectors, which are parameters of 0 and 1 dimensions and matrices of one row or column:
            "adamw", or "shampoo" with one factor for all but numbers.
        view: how a parameter of three or more dimensions is read: "stack" as a stack of matrices over its last two
            dimensions (experts), each with blocks of its own, as if it were a parameter of its own; "matrix" as one
            matrix, (first dimension, rest), which is what convolutions want; "auto" as a stack if it has three
            dimensions, as a matrix if it has more. `param_groups` tells convolutions by their modules.
        sides: "auto" cuts blocks that are more than about twice as long as wide once more, so that no factor is larger
            than the block, and preconditions those of up to 3 rows or columns from their short side alone; "both"
            preconditions every block from both sides, as the paper does.
        split_rows: into how many equal matrices the rows of a fused matrix are split, or a sequence of the rows of
            each: matrices that are computed together, such as queries, keys and values, share no factor then.
        split_columns: the same for columns.
        start_step: first step, by a parameter's own count, that Shampoo takes; the grafting method runs alone before.
        bias_correction: whether means are corrected for their zero start.
        maximize: go up the gradient.
        algorithm: "shampoo", or "adamw" for a group that AdamW shall move.
        on_nonfinite: what a gradient does that has a NaN or an infinity, or whose squared norm overflows, or that is
            missing on some of the processes that hold replicas: "skip" leaves its parameter and its state as they are
            at this step; "raise" stops before any parameter moves, for which it waits for the device at every step.
        state_dtype: "bf16" keeps means of gradients, the momentum and inverse roots in bfloat16, and row and column
            means alone of the squares that Adam or RMSprop grafting needs: twice the parameters, as AdamW, in place of
            4 times. Factors, AdamW's squares and all of float64 parameters stay as they are.
        max_workspace: bytes that a stage of the step may use beside the state; ``None`` is 64 MiB on a CPU, whose
            caches it suits, and 1 GiB elsewhere. It cannot go below tiles of 2^20 elements and single factors.
        process_group: processes that hold replicas of the parameters that are plain tensors, as under
            DistributedDataParallel: "auto" for the default group of `torch.distributed`, if there is one at the first
            step; ``None`` if each process trains a model of its own. DTensors, as `fully_shard` makes them, say
            themselves who holds them. Each process computes the blocks that it owns (docs/distributed.md). A group of
            parameters may have one of its own, given when the group is.
        wire_dtype: in which updates travel between processes: "fp32", as exact as on one process, or "bf16".

    Raises:
        ValueError: an option is out of range or unknown, or a parameter is in two places.
        TypeError: a parameter is complex, not floating point, sparse or on the meta device.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        block_size: int = 1024,
        solver: Any = "minimax",
        update_every: int = 10,
        damping: float = 1e-4,
        epsilon: float = 0.0,
        precision: str = "auto",
        grafting: str = "adam",
        graft_beta2: float | None = None,
        graft_eps: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        root: int | None = 2,
        vectors: str = "adamw",
        view: str = "auto",
        sides: str = "auto",
        split_rows: Any = None,
        split_columns: Any = None,
        start_step: int = 1,
        bias_correction: bool = True,
        maximize: bool = False,
        algorithm: str = "shampoo",
        on_nonfinite: str = "skip",
        state_dtype: str = "fp32",
        max_workspace: int | None = None,
        process_group: Any = "auto",
        wire_dtype: str = "fp32",
    ) -> None:
        options = dict(locals())
        for name in ("self", "params", "__class__", "process_group", "wire_dtype"):
            options.pop(name, None)
        check_process_group(process_group)
        self._wire = wire(wire_dtype)
        self._ownership = Ownership(Worlds(process_group))
        self._had_matrices: list[bool] = []
        self._banks: list[Bank] = []
        self._agreement = Agreement()
        self._arrangement: tuple[Any, ...] | None = None
        self._checked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._warned = False
        self._consolidated: Consolidated | None = None
        normalise(options)
        super().__init__(params, options)

    @classmethod
    def paper(cls, params: Any, lr: float | Tensor = 1e-3, **options: Any) -> Dash:
        """The configuration of arXiv 2602.02016: Newton-DB with 10 + 10 steps, exponent 1/4, roots at every step."""
        paper = {
            "solver": "newton-db-paper",
            "damping": 0.0,
            "epsilon": 1e-10,
            "update_every": 1,
            "root": None,
            "view": "matrix",
            "sides": "both",
        }
        return cls(params, lr, **{**paper, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, before the first step or after any other.

        Raises:
            ValueError: as for the constructor.
            TypeError: as for the constructor.
        """
        group = {**self.defaults, **param_group}
        own_processes = "process_group" in group
        process_group = group.pop("process_group", None)
        check_process_group(process_group)
        if not isinstance(group["params"], (Tensor, set)):
            group["params"] = list(group["params"])
            refuse_duplicates(group["params"])
        refuse_misspelt(group, self.defaults)
        normalise(group)
        super().add_param_group(group)
        try:
            check_parameters(self.param_groups)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if own_processes:
            self._ownership.worlds.choose(self.param_groups[-1]["params"], process_group)
        self._consolidated = None
        self._had_matrices.append(has_matrices(self.param_groups[-1]))
        self._checked.append((self.param_groups[-1], snapshot(self.param_groups[-1], self.defaults)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The base class adds this option to the defaults. In groups it would be missing in files made without it.
        for options in (self.defaults, *self.param_groups):
            options.pop("differentiable", None)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        release(self.state)
        if "_ownership" not in self.__dict__:  # unpickled, or copied
            self._ownership = Ownership(self.__dict__.pop("_worlds"))
            self._had_matrices = [has_matrices(group) for group in self.param_groups]
            self._agreement = Agreement()
            self._banks = []
        for bank in self._banks:
            bank.forget()
        self._arrangement, self._checked, self._warned = None, [], False
        self._consolidated = None

    def __getstate__(self) -> dict[str, Any]:
        self._make_ready_to_save()
        return {**super().__getstate__(), "_worlds": self._ownership.worlds, "_wire": self._wire}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain tensors and numbers: on several processes, of the tiles that this one owns.

        After `consolidate_state_dict` it is that of all processes. So it is where torch.distributed.checkpoint asks for
        a full state dict; collective then.

        Warns:
            RuntimeWarning: it is a part, and nobody asks for parts.
        """
        self._make_ready_to_save()
        part = super().state_dict()
        wanted = asked() if self.state and self._ownership.is_shared else None
        if wanted is not None and wanted.whole:
            return gather(self, part, self._ownership, None if wanted.everywhere else 0) or part
        if wanted is None and self._consolidated is not None:
            return part if self._consolidated.state is None else {**part, "state": self._consolidated.state}
        if wanted is None and self.state and self._ownership.is_partial:
            warnings.warn(f"this state dict is the part of one process. {REMEDIES}", RuntimeWarning, stacklevel=2)
        return part

    def _make_ready_to_save(self) -> None:
        count_gradients(self._banks, self.state)
        for group in self.param_groups:
            make_plain(group)

    def full_state_dict(self, to: int | None = 0) -> dict[str, Any] | None:
        """The state of all processes, as `state_dict` of a single process would give it, on the CPU. Collective.

        Args:
            to: rank of the process that gets it, in each group of processes that share parameters; ``None`` for all.

        Returns:
            The state dict at that process, ``None`` at the others.
        """
        self._make_ready_to_save()
        return gather(self, super().state_dict(), self._ownership, to)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers the state of all processes, so that `state_dict` has all of it until the next step. Collective.

        For trainers that save ``state_dict()`` of one process. Name and use are those of torch's
        ZeroRedundancyOptimizer: Lightning calls it by itself; docs/integrations.md has a line for other trainers.

        Args:
            to: rank of the process whose `state_dict` has all of it, as in `full_state_dict`; ``None`` for all. That of
                the others stays a part.
        """
        if self._ownership.is_shared:
            whole = self.full_state_dict(to)
            self._consolidated = Consolidated(None if whole is None else whole["state"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, bit for bit, whatever the parameters' dtype; parameters go by name if named.

        What `full_state_dict` gave can be loaded on any number of processes: each takes what it owns. A load that
        raises has changed nothing; hooks that are to run after it find it done.

        Raises:
            ValueError: the state is of another optimizer, of other parameters or of blocks of another size, it lacks
                something that this process owns, or an option in it is invalid; the message names the parameter.
        """
        refuse_mixture(state_dict["state"], self.state)
        self._ownership.entries(taking_part(self.param_groups, self.state, self._ownership.worlds))

        def matched(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return match(self, self._ownership, self._banks, state)

        # Registered last, so that it sees what the user's own hooks make of the state.
        handle = self.register_load_state_dict_pre_hook(matched)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @torch.no_grad()
    def diagnostics(self, *, detail: bool = False) -> dict[str, float]:
        """What went on inside, as plain numbers. Waits for the device.

        Args:
            detail: for every stack too. It takes about as long as a step, and costs nothing when it is not asked for.

        Returns:
            ``skipped``: steps that parameters skipped because their gradient was not finite, summed over parameters;
            ``roots``: inverse roots that are kept, here and below by this process alone; ``roots_failed``: how often a
            certificate refused one so far; ``roots_failing``: roots that it refused the last time; ``roots_rescued``:
            how often a float64 eigendecomposition stood in; ``residual``: largest certified residual of the last roots.

            With ``detail`` also, for the blocks of each shape, such as "block 64x128/rms": ``blocks``, how many there
            are; ``skipped``, the steps that they skipped; ``rms``, the root mean square of their last update before
            momentum, weight decay and learning rate; ``raw_rms``, the same before grafting; ``ratio``, of the two. For
            the factors of each size, such as "factor 64/condition": ``factors``, how many there are; ``largest``, the
            largest eigenvalue of any and ``condition``, the largest condition of any once it is damped, both estimated
            by power iteration, from below; ``residual``, ``failed``, ``failing`` and ``rescued`` as above. After
            `load_state_dict` they come with the next step.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        entries = [entry for parameter in parameters for entry in self.state.get(parameter, {}).items()]
        found = diagnostics.summary(self._banks, entries)
        if detail:
            count_gradients(self._banks, self.state)
            found.update(diagnostics.details(self._banks, self.state))
        return found

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step with the gradients that are there; parameters without one are left as they are.

        Args:
            closure: computes the loss and the gradients anew; its loss is returned.

        Raises:
            FloatingPointError: a gradient is not finite, or missing on some of the processes that hold replicas, and
                its group says ``on_nonfinite="raise"``; the message says which.
            RuntimeError: another process has failed, or has other parameters or options (docs/distributed.md).
            TypeError: a gradient is sparse.
            ValueError: the groups' options have become invalid, or no longer fit the state.
        """
        loss = None
        self._consolidated = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._arrange()
            self._move()
        finally:
            for bank in self._banks:
                bank.close()
        self._warn_of_skipped_steps()
        return loss

    def _move(self) -> None:
        """The step, once the stacks are as they should be."""
        banks = [bank for bank in self._banks if bank.takes_part()]
        expected = [ages(bank, self.state) for bank in banks]
        surveys = [bank.survey() for bank in banks]
        self._refuse_nonfinite(banks, surveys)
        taken = []
        for bank, survey in zip(banks, surveys, strict=True):
            taken.append(bank.admit(survey, [self.state[p]["age"] == 0 for p in bank.parameters]))
        turns = [[self.state[p]["turn"] for p in bank.parameters] for bank in banks]
        for each in zip(banks, expected, turns, taken, strict=True):
            _step(*each)
        for bank, own in zip(banks, taken, strict=True):
            bank.end(own)
        # What would wait for the device is counted a step later, where that costs nothing.
        count_gradients((bank for bank in banks if bank.is_known()), self.state)

    def _refuse_nonfinite(self, banks: list[Bank], surveys: list[Survey]) -> None:
        try:
            for bank, survey in zip(banks, surveys, strict=True):
                refuse_nonfinite(bank, survey, names(self.param_groups))
        except FloatingPointError:
            for bank in banks:
                bank.forget()
            raise

    def _warn_of_skipped_steps(self) -> None:
        if not self._warned and any(bank.has_skipped() for bank in self._banks):
            self._warned = True
            warnings.warn(
                "a gradient was not finite, or missing on some of the processes that hold replicas: its parameter "
                "skips the step, which diagnostics() counts; on_nonfinite='raise' stops there instead, and says which",
                RuntimeWarning,
                stacklevel=4,
            )

    def _arrange(self) -> None:
        """Makes the stacks follow the parameters, the options and the state, if one of them has changed."""
        count_gradients(self._banks, self.state)
        self._check_options()
        self._agreement.check()
        parameters = taking_part(self.param_groups, self.state, self._ownership.worlds)
        sparse = any(
            parameter.grad is not None and parameter.grad.layout != torch.strided for parameter, _ in parameters
        )
        asked_for = signature(parameters, self.param_groups)
        if asked_for == self._arrangement and not sparse:
            if not all(bank.holds([self.state.get(p, {}) for p in bank.parameters]) for bank in self._banks):
                take_over(self.state, self._banks, self._banks, names(self.param_groups), as_it_was=True)
            return
        check_parameters(self.param_groups)
        refuse_flattened(self.param_groups, self._had_matrices)
        called = names(self.param_groups)
        states = {parameter: self.state.get(parameter, {}) for parameter, _ in parameters}
        turns = {parameter: state["turn"] for parameter, state in states.items() if "turn" in state}
        entries = self._ownership.entries(parameters, turns)
        self._agreement.announce()
        self._agreement.compare(entries, called, self._wire)
        if self._arrangement is None and not self.state:
            warn_of_stale_parameters(entries, called)
        banks = arrange(entries, self._wire)
        take_over(self.state, banks, self._banks, called, as_it_was=False)
        self._banks, self._arrangement = banks, asked_for
        self._agreement.follow([(bank.census, bank.parameters) for bank in banks])

    def _check_options(self) -> None:
        """Checks the groups' options if any has changed since the last time."""
        if len(self._checked) == len(self.param_groups) and all(
            group is known and is_as_before(group, before)
            for group, (known, before) in zip(self.param_groups, self._checked, strict=True)
        ):
            return
        for group in self.param_groups:
            normalise(group)
        self._checked = [(group, snapshot(group, self.defaults)) for group in self.param_groups]


def _step(bank: Bank, ages: list[int], turns: list[int], taken: Tensor) -> None:
    """The paper's algorithm for the blocks that this process owns; `Bank.end` moves the parameters that others hold."""
    since = [age - group["start_step"] for age, group in zip(ages, bank.groups, strict=True)]
    started = [steps >= 0 for steps in since]
    bank.begin()
    counts = bank.steps.clamp(min=1)
    parts = [(part, part.per_block(taken), part.per_block(counts)) for part in bank.parts if part.has_gradients()]
    for part, live, steps in parts:
        shampoo.accumulate(part, live, steps)
    for factors, lanes in bank.lanes_due(since, turns):
        factors.update_roots(lanes)
    for part, live, steps in parts:
        shampoo.move(part, taken, live, steps, part.where(started))
    bank.send()
