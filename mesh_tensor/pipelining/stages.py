"""Stages: a function cut into one per stage, each of which takes parameters and values of stages before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm import ir, relax

from mesh_tensor.annotations.module_annotations import HINTS_ATTR
from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR
from mesh_tensor.base.errors import listing, refuse

from .assign import Stages
from .flow import Flow
from .schedule import Schedule

FUNCTION = "stage"


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a function on one mesh: `module`'s function "stage" takes `params` (of the whole function) and `takes`
    (value -> the stage that makes it), in this order, and returns `gives`: what later stages take, and those of the
    function's results that are made here: `results`, which callers get, and `state`, what comes in place of a parameter
    in the next call (parameter -> value). `only_state` of these nobody else takes."""

    index: int
    mesh: str
    module: ir.IRModule
    params: tuple[str, ...]
    takes: Mapping[str, int]
    gives: tuple[str, ...]
    results: tuple[str, ...]
    state: Mapping[str, str] = field(default_factory=dict)
    only_state: tuple[str, ...] = ()

    def __repr__(self) -> str:
        taken = ", ".join(f"{value} of {stage}" for value, stage in self.takes.items())
        return f"Stage({self.index} on {self.mesh!r}: takes {taken or 'nothing'}; gives {', '.join(self.gives)})"


def cut(flow: Flow, where: Stages, meshes: Sequence[str], only: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The function as stages on these meshes; `only`: those that are made, all if it is left out. Refused where a stage
    computes nothing that is used, or a tuple goes from one stage to another."""
    takes, gives = _crossing(flow, where, len(meshes))
    problems = [
        f"stage {stage} computes nothing that another stage or the result takes"
        for stage in range(len(meshes))
        if not gives[stage]
    ]
    problems += [
        f"{value!r}, which goes from stage {source} to stage {stage}, is {flow.bindings[value].var.struct_info}"
        for stage in range(len(meshes))
        for value, source in takes[stage].items()
        if not isinstance(flow.bindings[value].var.struct_info, relax.TensorStructInfo)
    ]
    if problems:
        refuse(problems, where=f"stages of {flow.function!r}", fix="name values that are tensors, in every stage some")
    return tuple(
        _stage(flow, where, n, mesh, takes, gives[n]) for n, mesh in enumerate(meshes) if only is None or n in only
    )


def check_state(flow: Flow, where: Stages, schedule: Schedule) -> None:
    """Refuse state that microbatches can't hand on: that several stages have, or whose stage runs them in another order
    than theirs."""
    problems, kept = [], dict[int, list[str]]()
    for name, value in flow.state.items():
        kept.setdefault(max(where.get(value, [0])), []).append(name)
        users = {index for user in flow.users[name] for index in where.get(user, ())} | where.get(value, set())
        if len(users) > 1:
            problems.append(f"{name!r}, which the model writes, is of stages {', '.join(map(str, sorted(users)))}")
    for stage, names in kept.items():
        row = schedule.rows[schedule.mesh_of[stage]]
        order = [action.microbatch for action in row if action.kind == "F" and action.stage == stage]
        if order != sorted(order):
            problems.append(f"stage {stage}, which writes {listing(names)}, runs forwards of microbatches {order}")
    if problems:
        refuse(
            problems,
            where=f"state of {flow.function!r}, on schedule {schedule.name!r}",
            why="what a microbatch leaves of it is what the next one takes",
            fix="keep what takes and writes it in one stage, and its forwards in the order of microbatches",
        )


def _crossing(flow: Flow, where: Stages, count: int) -> tuple[list[dict[str, int]], list[tuple[str, ...]]]:
    """Per stage what it takes of others, and what it gives, in the order of the bindings."""
    takes: list[dict[str, int]] = [{} for _ in range(count)]
    given: list[set[str]] = [set() for _ in range(count)]
    for name, stages in where.items():
        for stage in stages:
            for value in flow.operands[name]:
                if value in flow.bindings and stage not in where[value]:
                    takes[stage][value] = source = min(where[value])
                    given[source].add(value)
    for value in flow.results:
        if value not in where:
            refuse(
                f"the result {value!r} is a parameter as it is",
                where=f"module function {flow.function!r}",
                fix="return what is computed",
            )
        given[max(where[value])].add(value)
    return takes, [tuple(name for name in flow.bindings if name in names) for names in given]


def _stage(
    flow: Flow, where: Stages, index: int, mesh: str, takes: Sequence[Mapping[str, int]], gives: tuple[str, ...]
) -> Stage:
    mine = {name for name, stages in where.items() if index in stages}
    used = {value for name in mine for value in flow.operands[name]}
    state = {name: value for name, value in flow.state.items() if max(where[value]) == index}
    params = tuple(name for name in flow.params if name in used or name in state)
    module, taken = part(flow, mine, [*params, *takes[index]], gives), {name for each in takes for name in each}
    results = tuple(name for name in dict.fromkeys(flow.returned) if name in gives and max(where[name]) == index)
    only_state = tuple(value for value in dict.fromkeys(state.values()) if value not in {*results, *taken})
    return Stage(index, mesh, module, params, dict(takes[index]), gives, results, state, only_state)


def part(flow: Flow, mine: set[str], params: Sequence[str], gives: Sequence[str], name: str = FUNCTION) -> ir.IRModule:
    """The module of a function of some of the bindings: it takes `params` and returns the tuple of `gives`."""
    variables = flow.params | {value: binding.var for value, binding in flow.bindings.items()}
    mutator = _Part(flow.mod)
    taken = [mutator.parameter(variables[value]) for value in params]
    func = mutator.function(flow, mine, taken, [variables[value] for value in gives])
    func = func.with_attr("global_symbol", name)
    there = {*mine, *params}
    names = {theirs: own for theirs, own in flow.sources.items() if own in there}
    if names:
        func = func.with_attr(SOURCE_NAMES_ATTR, names)
    if kept := {value: hint for value, hint in flow.hints.items() if value in mine}:
        func = func.with_attr(HINTS_ATTR, kept)
    mod = flow.mod.clone()
    for var in [var for var, _ in mod.functions_items() if var.name_hint == flow.function]:
        mod = _without(mod, var)
    mod.update_func(ir.GlobalVar(name), func)
    return mod


def _without(mod: ir.IRModule, var: ir.GlobalVar) -> ir.IRModule:
    kept = {other: func for other, func in mod.functions_items() if not other.same_as(var)}
    return ir.IRModule(kept, attrs=mod.attrs, global_infos=mod.global_infos)


@relax.expr_functor.mutator
class _Part(relax.PyExprMutator):
    """Writes a function of some of another's bindings; what they take from outside are parameters."""

    def parameter(self, var: relax.Var) -> relax.Var:
        """A parameter for a variable."""
        made = relax.Var(var.name_hint, var.struct_info)
        self.set_var_remap(var.vid, made)
        return made

    def function(self, flow: Flow, mine: set[str], params: list[relax.Var], gives: list[relax.Var]) -> relax.Function:
        """The function that takes `params` and returns the tuple of `gives`."""
        leaving = {var.name_hint for var in gives if isinstance(var, relax.DataflowVar)}
        blocks, left = [], {}
        for kind, bindings in flow.blocks:
            kept = [name for name in bindings if name in mine]
            if not kept:
                continue
            made = []
            for name in kept:
                made.append(self._again(bindings[name]))
                if name in leaving:  # what a dataflow block gives is a variable of another kind
                    left[name] = relax.Var(f"{name}_out", made[-1].var.struct_info)
                    made.append(relax.VarBinding(left[name], made[-1].var))
            blocks.append(kind(made))
        outs = [left.get(var.name_hint) or self.get_var_remap(var.vid) or var for var in gives]
        fields = relax.Tuple(outs)
        out = relax.Var("stage_results", relax.TupleStructInfo([var.struct_info for var in outs]))
        blocks.append(relax.BindingBlock([relax.VarBinding(out, fields)]))
        return relax.Function(params, relax.SeqExpr(blocks, out), out.struct_info)

    def _again(self, binding: relax.Binding) -> relax.Binding:
        value = self.visit_expr(binding.value)
        if isinstance(binding, relax.MatchCast):
            return relax.MatchCast(binding.var, value, binding.struct_info)
        return relax.VarBinding(binding.var, value)
