"""Batches of a pipeline, split into microbatches; and what its function may return: rows of the batch, each from its
own, and numbers that are means or sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tvm import ir, tirx

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.pipelining.flow import Flow, stated_bindings
from mesh_tensor.pipelining.stages import FUNCTION, part
from mesh_tensor.plan.batch_kinds import Fixed, Kind, Mean, Mixed, Rows, Sum
from mesh_tensor.plan.batch_parts import BatchParts, Total, batch_parts
from mesh_tensor.rules.operator.dropout import SEED_NAME
from mesh_tensor.runtime.ambient import fix_of, why_not_plain
from mesh_tensor.runtime.module_inputs import ModuleSignature, bound
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import torch_dtype

REDUCTIONS = (None, "mean", "sum")
_SIZES = (61, 13, 5, 2)  # open sizes are looked at as such
_FIX = (
    "return rows of the batch, and sums or means over them (say reduction='sum' or 'mean' of what numbers divide); or "
    "run it with microbatches=1"
)


class Results:
    """How a function's results are those of the batch: `flow` is the function, in which what has to be known of the
    whole batch before anything runs are parameters."""

    def __init__(self, flow: Flow, found: BatchParts | None = None) -> None:
        self.flow = flow
        self._kinds = dict(zip(flow.results, found.kinds, strict=True)) if found else {}
        self._totals = {total: _module_of(flow, total) for total in (found.totals if found else ())}
        self._shares = {name: torch_dtype(dtype) for name, dtype in (found.shares if found else {}).items()}

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name} {kind}" for name, kind in self._kinds.items())
        return f"Results({kinds}; knows {', '.join([*(total.name for total in self._totals), *self._shares])})"

    def seed(self, loss: str, share: float) -> float:
        """The gradient of the batch's loss by that of a microbatch with so large a share of the rows."""
        return 1.0 if isinstance(self._kinds.get(loss), Sum) else share

    def merged(self, name: str, parts: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
        """The microbatches' values of a result as the batch's."""
        kind = self._kinds.get(name)
        if len(parts) == 1 or isinstance(kind, Fixed):
            return parts[0].clone()  # may be a weight's memory, where a rank has all of it
        return torch.cat(list(parts)) if isinstance(kind, Rows) else _combined(kind, parts, shares)

    def check_totals(
        self,
        made: Mapping[str, Sequence[torch.Tensor]],
        weights: Mapping[str, torch.Tensor],
        parts: Sequence[Mapping[str, torch.Tensor]],
        shares: Sequence[float],
    ) -> None:
        """Refuse numbers that are infinite in microbatches because these are divided by a total of 0: the batch's is
        not their sum."""
        numbers = [name for name in made if isinstance(self._kinds.get(name), (Sum, Mean))]
        infinite = [name for name in numbers if self._totals and any(bool(part.isinf().any()) for part in made[name])]
        if not infinite:
            return
        names = [total.name for total in self._totals]
        known = self.with_totals(weights, parts, shares, names)[0]
        zeros = [total.value for total in self._totals if not bool(known[total.name].all())]
        if zeros:
            refuse(
                f"microbatches don't make the result {listing(infinite)}: {listing(zeros)} of the batch is 0, by which"
                " it is divided",
                where=f"call of the pipeline of {self.flow.function!r}",
                why="what is infinite in each microbatch doesn't add up to what the batch gives",
                fix="pass a batch for which that isn't 0, or run it with microbatches=1",
            )

    def with_totals(
        self,
        weights: Mapping[str, torch.Tensor],
        parts: Sequence[Mapping[str, torch.Tensor]],
        shares: Sequence[float],
        taken: Collection[str],
    ) -> list[dict[str, torch.Tensor]]:
        """The microbatches with what they have to know of their batch, as far as that is `taken`."""
        wanted = set(taken)
        for total, (takes, _) in reversed(self._totals.items()):  # which may take earlier ones
            wanted |= set(takes) if total.name in wanted else set()
        known: dict[str, torch.Tensor] = {}
        for total, (takes, module) in self._totals.items():
            if total.name not in wanted:
                continue
            made = []
            for each in parts:
                there = {**weights, **each, **known}
                made.append(run_sequential(module, [there[name] for name in takes], FUNCTION)[0])
            known[total.name] = _combined(total.kind, made, shares)
        return [
            {**part, **known, **{name: torch.tensor(share, dtype=dtype) for name, dtype in self._shares.items()}}
            for part, share in zip(parts, shares, strict=True)
        ]


def check_loss(flow: Flow, where: str) -> None:
    """Refuse a function whose first result is no number of floats."""
    first = next(iter(flow.returned), None)
    variables = {**flow.params, **{name: binding.var for name, binding in flow.bindings.items()}}
    info = variables[first].struct_info if first is not None else None
    if first is None or not flow.is_float(first) or variables[first].struct_info.ndim:
        refuse(
            f"the first result, {first!r}, is {info}, and no loss",
            where=where,
            fix="return one number of floats first: a mean over the rows",
        )


def results_of(
    flow: Flow,
    signature: ModuleSignature,
    inputs: Sequence[str],
    trained: Sequence[str],
    reduction: str | None,
    microbatches: int,
    per_microbatch: Sequence[str] = (),
) -> Results:
    """How the results of a function on microbatches are those on the batch. Refused where there is no loss to train
    for, or microbatches don't make the results."""
    if reduction not in REDUCTIONS:
        refuse(f"reduction={shown(reduction)}", fix="say whether numbers are a 'mean' or a 'sum' over rows, or nothing")
    if trained:
        check_loss(flow, f"pipeline of {flow.function!r} with train")
    stated = stated_bindings(flow, per_microbatch)
    if microbatches == 1:
        return Results(flow)
    sized = sized_module(flow, signature)
    large = [name for name, var in flow.params.items() if name not in inputs and var.struct_info.ndim > 1]
    found = batch_parts(
        flow.mod,
        flow.function,
        inputs,
        [*trained, *large, *flow.state],  # what needs these takes a stage
        shapes_of=sized,
        stated=stated,
        by_itself=flow.above([*stated, *flow.state.values()]),  # what the next microbatch takes is of this one
        quotients=reduction,
        larger=sized_module(flow, signature, inputs),
        own_seeds=True,
        written=flow.state,
    )
    _check(flow, found, reduction, sized is not None, inputs)
    return Results(flow if found.mod is flow.mod else Flow(found.mod, flow.function), found)


def sized_module(flow: Flow, signature: ModuleSignature, doubled: Sequence[str] = ()) -> ir.IRModule | None:
    """The module with sizes in place of open ones, if there are any; the inputs `doubled` have twice as many rows."""
    infos = [flow.params[name].struct_info for name in doubled]
    twice = {var for info in infos if info.ndim for var in tirx.analysis.undefined_vars(info.shape.values[0])}
    problem = ""
    for size in _SIZES if signature.symbols else ():
        sizes = {var: (size + 2 * i) * (2 if var in twice else 1) for i, var in enumerate(signature.symbols)}
        try:
            sized = bound(flow.mod, flow.function, sizes)
            Flow(sized, flow.function)
            return sized
        except Exception as error:
            problem = str(error)
    if problem:
        refuse(
            f"how results depend on the batch's rows is not known: {problem}",
            where=f"pipeline of {flow.function!r}",
            fix="export the model for a known number of rows",
        )
    return None


def _check(flow: Flow, found: BatchParts, reduction: str | None, is_open: bool, inputs: Sequence[str]) -> None:
    """Refuse results that microbatches don't make, and those that are another reduction than was said."""
    problems, whys = [], []
    for name, kind in dict(zip(flow.results, found.kinds, strict=True)).items():
        if name not in flow.returned:
            continue
        if isinstance(kind, Mixed):
            problems.append(f"microbatches don't make the result {name!r} of a batch: {kind.why}")
        elif isinstance(kind, Rows) and (kind.dim or kind.outer > 1):
            problems.append(f"the first dim of the result {name!r} is not the batch's")
        elif isinstance(kind, Sum) and reduction != "sum" and found.mod is flow.mod and not (is_open and not reduction):
            whys.append(f"the result {name!r} is a sum")
        elif isinstance(kind, Mean) and reduction == "sum":
            whys.append(f"the result {name!r} is a mean")
    if whys:
        refuse(
            whys,
            where=f"pipeline of {flow.function!r} with reduction={reduction!r}",
            why="its numbers may have been read off the size of a microbatch",
            fix="say reduction='sum' or 'mean' as it is, or export the model with an open batch size",
        )
    if problems:
        refuse(
            problems,
            where=f"pipeline of {flow.function!r}",
            why="a batch goes through it in microbatches of rows",
            fix=f"{_FIX}; per_microbatch=[names] takes what these values make of each microbatch"
            + (f"; {listing(inputs)} are taken for batches: pass as `weights` what all rows share" * (len(inputs) > 1)),
        )


def _module_of(flow: Flow, total: Total) -> tuple[tuple[str, ...], ir.IRModule]:
    """What computes a microbatch's part of a total, as its function FUNCTION, and what it takes."""
    mine = flow.above([total.value])
    used = {value for name in mine for value in flow.operands[name]}
    takes = tuple(name for name in flow.params if name in used)
    return takes, part(flow, mine, takes, [total.value])


def _combined(kind: Kind | None, parts: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    dtype = parts[0].dtype
    if isinstance(kind, Sum):
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        return torch.stack([part.to(wide) for part in parts]).sum(0).to(dtype)
    weighted = [part.double() * share for part, share in zip(parts, shares, strict=True)]
    return torch.stack(weighted).sum(0).to(dtype)


Tensors = Mapping[str, torch.Tensor]


def split_batch(signature: ModuleSignature, batch: Tensors, count: int) -> list[dict[str, torch.Tensor]]:
    """The batch in `count` microbatches along the first dim: of the rows that the function takes, or evenly. Each drops
    by a seed of its own, as where a training step's gradients are accumulated."""
    strange = [f"input {name!r} is {found}" for name, given in batch.items() if (found := _why_not_split(given))]
    if strange:
        fix = fix_of(strange, batch.values(), "pass torch tensors: whole batches")
        refuse(strange, where=f"call of the pipeline of {signature.function!r}", fix=fix)
    if count == 1:  # as it is, whatever its first dims are
        return [dict(batch)]
    seeds = {name: tensor for name, tensor in batch.items() if name == SEED_NAME}
    batch = {name: tensor for name, tensor in batch.items() if name not in seeds}
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in batch.items()}
    rows = max(sizes.values(), default=0)
    own = [p.shape[0] for p in signature.params if p.name in batch and p.shape]
    fixed = next((size for size in own if isinstance(size, int)), None)
    problems = [f"input {name!r} has {size} rows, others {rows}" for name, size in sizes.items() if size != rows]
    fix = "pass more rows, the same for all inputs, or fewer microbatches; what all rows share is a weight"
    if not problems and fixed is not None and rows != fixed * count:
        problems = [f"a batch of {rows} rows in {count} microbatches, but the module takes {fixed} rows at a time"]
        fix = f"pass {count} x {fixed} rows, or export the model with an open batch size"
    elif not problems and rows < count:
        problems = [f"a batch of {rows} rows in {count} microbatches leaves some without rows"]
    if problems:
        refuse(problems, where=f"call of the pipeline of {signature.function!r}", fix=fix)
    split = {name: tensor.split(_sizes(rows, count)) for name, tensor in batch.items()}
    parts = [{name: tensors[i] for name, tensors in split.items()} for i in range(count)]
    return [part | {name: seed * count + i for name, seed in seeds.items()} for i, part in enumerate(parts)]


def _sizes(rows: int, count: int) -> list[int]:
    """The rows of each microbatch: alike but for a smaller last one, or, where that would have none, almost alike."""
    each = -(-rows // count)
    left = rows - each * (count - 1)
    return [each] * (count - 1) + [left] if left > 0 else [rows // count + (i < rows % count) for i in range(count)]


def _why_not_split(given: Any) -> str:
    """What is wrong with an input that has no rows to be split; nothing, where it has."""
    if not isinstance(given, torch.Tensor):
        return shown(given)
    found = why_not_plain(given)
    return f"a tensor of another kind: {found[0]}" if found else ""


def rows_of(part: Tensors) -> int:
    """How many rows a microbatch has."""
    return next((tensor.shape[0] for tensor in part.values() if tensor.ndim), 1)
