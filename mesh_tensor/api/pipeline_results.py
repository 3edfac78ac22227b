"""What a pipeline's function may return: rows of the batch, each from its own, and numbers that are means or sums."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.module_annotations import read_module_annotations
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.pipeline.flow import Flow
from mesh_tensor.pipeline.stages import FUNCTION, part
from mesh_tensor.program.plan_module import plan_module

REDUCTIONS = ("mean", "sum")
_ROWS = Mesh({"rows": 2})


def check_results(flow: Flow, inputs: Sequence[str], trains: bool, reduction: str, microbatches: int) -> None:
    """Refuse results that microbatches don't make: a loss that is no number, a sum that is taken for a mean, tensors
    whose rows need other rows."""
    if reduction not in REDUCTIONS:
        refuse(f"reduction={shown(reduction)}", fix="say whether numbers are a 'mean' or a 'sum' over rows")
    infos = {
        name: (flow.bindings[name].var if name in flow.bindings else flow.params[name]).struct_info
        for name in flow.results
    }
    if trains and not (flow.is_float(flow.results[0]) and infos[flow.results[0]].ndim == 0):
        refuse(
            f"the first result, {flow.results[0]!r}, is {infos[flow.results[0]]}, and no loss",
            where=f"pipeline of {flow.function!r} with train",
            fix="return one number of floats first: a mean over the rows",
        )
    if microbatches == 1:
        return
    sums = [name for name, info in infos.items() if info.ndim == 0 and _is_sum(flow, name)]
    if sums and reduction == "mean":
        refuse(
            [f"the result {name!r} is a sum" for name in sums],
            where=f"pipeline of {flow.function!r}",
            why="numbers of microbatches are put together as means over rows",
            fix="say reduction='sum', or return a mean",
        )
    rows = [name for name, info in infos.items() if info.ndim > 0]
    if rows:
        _check_rows(flow, inputs, rows)


def _check_rows(flow: Flow, inputs: Sequence[str], rows: list[str]) -> None:
    """Split over two devices by rows, results need to be split likewise without anything having been exchanged."""
    mine = flow.above(rows)
    used = {value for name in mine for value in flow.operands[name]}
    mod = part(flow, mine, [name for name in flow.params if name in used], rows)
    split = {name: {"rows": 0} for name in inputs if name in used and flow.params[name].struct_info.ndim}
    why = "the batch is split by rows, and results are put together by rows"
    try:
        stated = read_module_annotations(annotate_module(mod, _ROWS, split, FUNCTION), FUNCTION, _ROWS)
        plan = plan_module(stated.module, FUNCTION, _ROWS, stated.annotations, replicate_unknown=True)
    except ValueError as error:
        refuse(f"how the results' rows depend on the batch's is not known: {error}", fix="run it with microbatches=1")
    values, results = plan.made.program.values, plan.made.result
    whole = [name for name, own in zip(rows, results, strict=True) if values[own].sharding.dim_of("rows") != 0]
    facts = [f"the first dim of the result {name!r} is not the batch's" for name in whole]
    facts += [f"rows need others: {step.kind} of {step.src!r}" for step in plan.made.program.collectives]
    if facts:
        refuse(
            facts,
            where=f"pipeline of {flow.function!r}",
            why=why,
            fix="return rows of the batch, and numbers; or run it with microbatches=1",
        )


def _is_sum(flow: Flow, name: str) -> bool:
    value = flow.bindings[name].value if name in flow.bindings else None
    while isinstance(value, relax.Var) and value.name_hint in flow.bindings:
        value = flow.bindings[value.name_hint].value
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.sum"
