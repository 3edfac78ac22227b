"""Stages: a function cut into one per stage, each of which takes parameters and values of stages before it.
Fragments: a stage's forward, and its backward as a whole or in halves, cut out of one joint function.

What a gradient needs of the forward is saved by it, once for both halves; what follows from weights alone (a transposed
weight) is computed again instead, as it costs next to nothing and would be held for every microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm import ir, relax

from mesh_tensor.annotations.module_annotations import HINTS_ATTR
from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.plan.manual import leaves_devices

from .assign import Stages
from .flow import Flow
from .schedule import Schedule


@dataclass(frozen=True, eq=False)
class FragmentFunction:
    """A function of `module`, called as its kind: its parameters are the values `takes`, it returns those of `gives`.

    Names are of the stage's values; `d_x` is the gradient of x. `own` has the function's own names of them."""

    kind: str
    module: ir.IRModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    own: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class JointStage:
    """A stage with its gradients: `module`'s function takes the stage's parameters, then gradients of what it gives;
    returns what the stage gives, then gradients of `wrt`: parameters, and values that the stage takes. What follows
    from the parameters `constant` alone is computed again, as what follows from weights with gradients is."""

    stage: Stage
    module: ir.IRModule
    wrt: tuple[str, ...]
    constant: tuple[str, ...] = ()


def gradient_name(value: str) -> str:
    """What the gradient of a value is called between stages."""
    return f"d_{value}"


def saved_name(value: str) -> str:
    """What a value is called that a forward leaves for its stage's backward, and nobody else takes."""
    return f"saved.{value}"


def fragments_of(joint: JointStage, recompute: bool = False) -> dict[str, FragmentFunction]:
    """F, B, I and W of a stage; without the halves that compute nothing.

    `recompute` saves nothing of the forward but what the stage takes: the backward runs it again.
    """
    return _Fragments(joint, recompute).made()


class _Fragments:
    def __init__(self, joint: JointStage, recompute: bool) -> None:
        self.flow, self.stage = Flow(joint.module, "stage"), joint.stage
        self.recompute, self.constant = recompute, joint.constant
        results = self.flow.results
        count = len(self.stage.gives)
        self.gives = dict(zip(self.stage.gives, results[:count], strict=True))
        self.gradients = dict(zip(map(gradient_name, joint.wrt), results[count:], strict=True))
        inner = [gradient_name(name) for name in joint.wrt if name in self.stage.takes]
        self.of_inputs = {name: own for name, own in self.gradients.items() if name in inner}
        self.of_weights = {name: own for name, own in self.gradients.items() if name not in inner}
        self.names = self._stage_names()
        self._divide()

    def _stage_names(self) -> dict[str, str]:
        """The function's own names -> the stage's."""
        names = {own: name for name, own in reversed(list(self.gives.items()))}
        taken = [*self.stage.params, *self.stage.takes]
        seeds = [name for name in self.flow.params if name not in taken]
        seeded = [own for name, own in self.gives.items() if name not in self.stage.only_state]
        floats = [own for own in dict.fromkeys(seeded) if self.flow.is_float(own)]
        gradients = {seed: gradient_name(names[own]) for seed, own in zip(seeds, floats, strict=True)}
        return names | gradients | {name: name for name in taken}

    def _divide(self) -> None:
        """Which bindings are of the forward, of the input gradients, and of the weights'."""
        flow = self.flow
        held = {*self.stage.params} - {name for name in self.stage.params if gradient_name(name) in self.gradients}
        moving = [name for name in flow.params if name in held or name not in self.stage.params]
        varying = flow.below([name for name in moving if name not in self.constant])
        used = flow.above(flow.results)
        self.forward = self._with_kept(self._with_fields(flow.above(self.gives.values()), used))
        self.inputs = self._with_fields(flow.above(self.of_inputs.values()) - self.forward, used)
        self.weights = flow.above(self.of_weights.values()) - self.forward - self.inputs
        again = self.forward if self.recompute else self.forward - varying
        self.inputs = self._with(self.inputs, again)
        self.weights = self._with(self.weights, again - self.inputs if self.recompute else again)
        self.both = self._with(self.inputs | self.weights, again)

    def _with_fields(self, mine: set[str], used: set[str]) -> set[str]:
        """The bindings with all fields of their tuples: a fragment gives tensors."""
        for name, binding in self.flow.bindings.items():
            if name in used and isinstance(binding.value, relax.TupleGetItem) and self.flow.operands[name][0] in mine:
                mine.add(name)
        return mine

    def _with_kept(self, mine: set[str]) -> set[str]:
        """The bindings with what the backward takes of what devices have of their own, along a dim of devices."""
        ends = [n for n, b in self.flow.bindings.items() if isinstance(b.value, relax.Call) and leaves_devices(b.value)]
        return mine | {name for name in ends if set(self.flow.operands[name]) <= mine}

    def _with(self, mine: set[str], again: set[str]) -> set[str]:
        """The bindings with those of `again` that they need."""
        needed = [value for name in mine for value in self.flow.operands[name] if value in again]
        return mine | self.flow.above(needed, again)

    def made(self) -> dict[str, FragmentFunction]:
        saved = [name for name in self._outside(self.both) if name in self.forward]
        later = [*self._outside(self.weights), *(own for own in self.of_weights.values() if own in self.inputs)]
        halfway = [name for name in later if name in self.inputs]
        saved = list(dict.fromkeys([*saved, *(name for name in later if name in self.forward - self.inputs)]))
        forward = {**self.gives, **{self._saved(name): name for name in saved}}
        found = {"F": self._function("F", self.forward, forward)}
        if self.gradients:
            found["B"] = self._function("B", self.both, self.gradients)
        if self.of_inputs:
            found["I"] = self._function("I", self.inputs, {**self.of_inputs, **{self._saved(n): n for n in halfway}})
        if self.of_weights:
            found["W"] = self._function("W", self.weights, self.of_weights)
        return found

    def _outside(self, mine: set[str]) -> list[str]:
        """What bindings take that is bound elsewhere."""
        taken = (value for name in self.flow.bindings if name in mine for value in self.flow.operands[name])
        return [name for name in dict.fromkeys(taken) if name in self.flow.bindings and name not in mine]

    def _saved(self, own: str) -> str:
        return self.names.get(own, saved_name(own))

    def _function(self, kind: str, mine: set[str], gives: Mapping[str, str]) -> FragmentFunction:
        flow = self.flow
        operands = {value for name in mine for value in flow.operands[name]}
        operands |= {own for own in gives.values() if own not in mine}
        takes = [name for name in (*flow.params, *flow.bindings) if name in operands and name not in mine]
        module = part(flow, mine, takes, list(gives.values()), kind)
        own = {self._saved(name): name for name in takes} | dict(gives)
        return FragmentFunction(kind, module, tuple(self._saved(name) for name in takes), tuple(gives), own)


def without_gradient(joint: JointStage) -> frozenset[str]:
    """Those of `wrt` on which nothing that the stage gives depends so that it has a gradient."""
    flow = Flow(joint.module, FUNCTION)
    made = zip(joint.wrt, flow.results[len(joint.stage.gives) :], strict=True)
    values = {name: flow.bindings[own].value for name, own in made if own in flow.bindings}
    return frozenset(name for name, value in values.items() if _is_zero(value))


def _is_zero(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.zeros"


def trained_values(flow: Flow, weights: Sequence[str]) -> set[str]:
    """The values of floats that depend on weights: those whose gradients go from stage to stage."""
    return {name for name in flow.below(weights) if flow.is_float(name)}


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
    """The function as stages on these meshes; `only`: those that are made, all if it is left out.

    Raises:
        MeshTensorError: a stage computes nothing that is used, or a tuple goes from one stage to another.
    """
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
