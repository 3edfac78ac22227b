"""to_program: the Program of an ExplicitGraph, the same that kernels have: operators and collectives on values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx

from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.lowering.local_calls import TileCalls
from mesh_tensor.plan.atoms import made_plain, plain_sharding
from mesh_tensor.plan.explicit import Change, ExplicitGraph, ExplicitStep, Form, Run
from mesh_tensor.plan.ir import Scope, leaves, map_tree
from mesh_tensor.plan.prices import bytes_moved
from mesh_tensor.rules.operator.call import OpCall, tensor_type
from mesh_tensor.rules.operator.elementwise import divides_integers
from mesh_tensor.rules.operator.index import LOOK_UPS

from .buckets import bucketed
from .builder import collective_step, with_lifetimes, with_updates_in_place
from .from_loops import Loops, carried_forms
from .fuse import fused
from .kernel_steps import KernelSteps
from .overlap import early_starts, with_overlap
from .program import Parameter, Program, ProgramValue
from .steps import OpStep, Step
from .verify import checked


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the plan in the order in which the module has it: `steps` make the values `outputs` of `inputs`. It
    stands in the calls of functions `scopes`."""

    scopes: tuple[Scope, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class ModuleProgram:
    """A module's Program. Its parameters are the function's own (named in `inputs`), then the constants (with their
    data), then what it computes. `result` is what the function returns: a tree of names of values.

    `pieces` is what its steps were scheduled from; `tiles` has the tiles of the module's own tensors with their own
    dims."""

    program: Program
    inputs: tuple[str, ...]
    constants: dict[str, relax.Constant]
    result: Any
    pieces: tuple[Piece, ...]
    tiles: Mapping[str, relax.TensorStructInfo]

    def tile(self, name: str) -> relax.TensorStructInfo:
        """The struct info of a value's tile."""
        if name in self.tiles:
            return self.tiles[name]
        value = self.program.values[name]
        return relax.TensorStructInfo(value.tile_shape, value.dtype)


# By operator: a kernel that computes a call on tiles, or None where it does not fit.
Kernels = Mapping[str, Callable[[OpCall], "tirx.PrimFunc | None"]]


def to_program(
    explicit: ExplicitGraph,
    calls: TileCalls,
    kernels: Kernels,
    overlap: str | int = "auto",
    *,
    check_indices: bool = True,
    fuse: bool = True,
) -> ModuleProgram:
    """The steps of every device, as a Program over values whose shapes are those of their atoms. Operators run as
    `kernels` where there is one; `overlap` says what runs beside what; `fuse`: operators are taken together."""
    return _Programmer(explicit, calls, kernels, check_indices, fuse).made(overlap)


class _Programmer:
    def __init__(
        self, explicit: ExplicitGraph, calls: TileCalls, kernels: Kernels, check_indices: bool, fuse: bool
    ) -> None:
        self._calls, self._kernels, self._check_indices, self._fuse = calls, kernels, check_indices, fuse
        self._explicit, self._atoms = explicit, explicit.atoms
        self._values: dict[str, ProgramValue] = {}
        self._tiles: dict[str, relax.TensorStructInfo] = {}
        self._known_kernels: dict[OpCall, tirx.PrimFunc | None] = {}
        self._constants: dict[str, relax.Constant] = {}
        read = [step for step in explicit.steps if step.move is not None or step.runs_kernel]
        self._in_one_piece = {*leaves(explicit.result), *(form for step in read for form in step.inputs)}
        self._in_one_piece.update(carried_forms(explicit.steps))
        self._kinds: dict[type, Callable[[Any], Iterator[Step]]] = {Run: self._run, Change: self._change}
        self._loops = Loops(explicit.graph, self._values, self._finished)

    def made(self, overlap: str | int) -> ModuleProgram:
        explicit, graph = self._explicit, self._explicit.graph
        for form in (*explicit.params, *explicit.constants):
            self._value(form)
        self._constants |= {form.name: form.value.data for form in explicit.constants if form.value.data is not None}
        self._overlap = overlap
        pieces = tuple(self._pieces(explicit.steps, 0))
        steps: Sequence[Step] = [step for piece in pieces for step in piece.steps]
        if graph.state and overlap == "auto":
            steps, added = bucketed(steps, self._values, graph.mesh, graph.prices.machine)
            self._values |= added
        inputs = tuple(form.name for form in explicit.params)
        given = {*inputs, *self._constants}
        computed = dict.fromkeys(form.name for form in leaves(explicit.result) if form.name not in given)
        parameters = (
            *(Parameter(name, name, None) for name in (*inputs, *self._constants)),
            *(Parameter(name, None, name) for name in computed),
        )
        results = dict(zip(leaves(graph.result), leaves(explicit.result), strict=True))
        returned = {form.name for form in leaves(explicit.result)}
        forms = {form.value: form.name for form in explicit.params if form.name not in returned}
        state = {forms[replaced]: results[result].name for replaced, result in graph.state.items() if replaced in forms}
        lasting = self._finished(steps, parameters, {} if graph.loops else state)
        bulk = checked(
            Program(graph.name, graph.mesh, parameters, self._values, lasting, partial(_decisions, explicit))
        )
        program = bulk if overlap == "auto" else with_overlap(bulk, overlap)
        result = map_tree(explicit.result, lambda form: form.name)
        return ModuleProgram(program, inputs, self._constants, result, pieces, self._tiles)

    def _value(self, form: Form) -> ProgramValue:
        """A value's shape is over its atoms, like its layout."""
        if form.name not in self._values:
            shape = self._atoms.shape(form.value)
            self._values[form.name] = ProgramValue(form.name, shape, form.dtype, form.sharding, form.name)
            self._tiles[form.name] = self._calls.info(form)
        return self._values[form.name]

    def _finished(
        self, steps: Sequence[Step], parameters: Sequence[Parameter], state: Mapping[str, str] | None = None
    ) -> tuple[Step, ...]:
        """The steps with operators taken together, collectives that start early, and memory that comes and goes.
        `state`: parameters, with the results that replace them, which may be in their memory."""
        lasting = {name for p in parameters for name in (p.input, p.output) if name is not None}
        steps = fused(steps, self._values, lasting, self._constants) if self._fuse else steps
        ordered = early_starts(steps, self._values) if self._overlap == "auto" else steps
        ordered, stored = with_updates_in_place(ordered, self._values, state or {})
        self._values |= stored
        return with_lifetimes(ordered, self._values, parameters)

    def _pieces(self, steps: Sequence[ExplicitStep], depth: int) -> Iterator[Piece]:
        """The parts of a plan that stand in so many loops; a loop is one."""
        for scope, group in self._loops.groups(steps, depth):
            if scope is None:
                yield from (self._piece(step) for step in group if not self._enters(step))
                continue
            for step in group:
                for form in step.outputs:
                    self._value(form)
            loop = self._loops.step(scope, group, partial(self._inner_steps, depth=depth + 1))
            outer = group[0].scopes
            yield Piece(outer[: outer.index(scope)], loop.reads, loop.writes, (loop,))

    def _inner_steps(self, steps: Sequence[ExplicitStep], depth: int) -> list[Step]:
        return [made for piece in self._pieces(steps, depth) for made in piece.steps]

    def _enters(self, step: ExplicitStep) -> bool:
        """Whether the step says what a loop begins with: nothing is done there."""
        if step.mark != "loop.enter":
            return False
        for form in (*step.inputs, *step.outputs):
            self._value(form)
        self._loops.enter(step)
        return True

    def _piece(self, step: ExplicitStep) -> Piece:
        for form in step.outputs:
            self._value(form)
        steps = tuple(self._kinds.get(type(step), self._ops)(step))
        return Piece(step.scopes, _names(step.inputs), _names(step.outputs), steps)

    def _run(self, step: Run) -> Iterator[Step]:
        return KernelSteps(step, self._atoms, self._values).steps() if step.runs_kernel else self._ops(step)

    def _change(self, step: Change) -> Iterator[Step]:
        yield collective_step(step.move, self._value(step.src), self._value(step.dst), step.reason)

    def _ops(self, step: ExplicitStep) -> Iterator[Step]:
        """An operator; where it is several on tiles, each of them."""
        whole = frozenset(form.name for form in step.outputs if form in self._in_one_piece)
        tiles, calls = [form.name for form in step.inputs], self._calls.of(step)
        for made in calls:
            operands = tuple(tiles[o] if isinstance(o, int) else self._constant(o) for o in made.operands)
            results = _names(step.outputs) if made is calls[-1] else (self._inner(made.call),)
            tiles += results
            kernel, checked = self._kernel(made.call), self._check_indices and self._may_fail(made.call, operands)
            yield OpStep(made.call, operands, results, whole, made.flops, step.where, kernel, checked)

    def _may_fail(self, call: OpCall, operands: Sequence[str]) -> bool:
        """Whether values of operands may be such that there is no result: indices, and what integers are divided by."""
        if call.operator in LOOK_UPS:
            return True
        divisor = self._constants.get(operands[1]) if divides_integers(call) else None
        return divides_integers(call) and (divisor is None or not np.all(divisor.data.numpy()))

    def _kernel(self, call: OpCall) -> tirx.PrimFunc | None:
        if call.name not in self._kernels:
            return None
        if call not in self._known_kernels:
            self._known_kernels[call] = self._kernels[call.name](call)
        return self._known_kernels[call]

    def _constant(self, constant: relax.Constant) -> str:
        """An operator's own constant."""
        tensor, name = tensor_type(constant.struct_info, "a constant"), f"const.{len(self._values)}"
        self._constants[name] = constant
        self._add_whole(name, tensor.shape, tensor.dtype)
        return name

    def _inner(self, call: OpCall) -> str:
        """A value between the calls of one operator: known as the tile that a device has, and as nothing else."""
        (tensor,) = call.outputs
        name = f"gv.{len(self._values)}"
        self._add_whole(name, tensor.shape, tensor.dtype, inner=True)
        return name

    def _add_whole(self, name: str, shape: tuple[int, ...], dtype: str, *, inner: bool = False) -> None:
        whole = Sharding.of(self._explicit.graph.mesh, len(shape), {})
        self._values[name] = ProgramValue(name, shape, dtype, whole, name, inner=inner)


def _names(forms: Iterable[Form]) -> tuple[str, ...]:
    return tuple([form.name for form in forms])


def _decisions(explicit: ExplicitGraph) -> Decisions:
    """Annotations that meet, weights that are stored in another order, and what is gathered at the boundary."""
    graph = explicit.graph
    one = len(graph.annotations) == 1
    title = "an annotation that can't be used as stated" if one else "annotations that meet"
    conflicts = [f"  {conflict}" for conflict in explicit.layouts.conflicts]
    head = (f"module function {graph.name} on {graph.mesh}",)
    orders = [f"  {v.name}: {o.parts} parts of {o.sections} along dim {o.dim}" for v, o in graph.stored.items()]
    found = (
        (title, conflicts),
        ("weights that are stored in another order", orders),
        ("rows that masks choose", _chosen_rows(graph.chosen_rows)),
    )
    sections = tuple((name, *lines) for name, lines in found if lines)
    boundary = list(_gathered_at_the_boundary(explicit))
    notes = (("gathered where it comes, or goes, in tiles", *boundary),) if boundary else ()
    return Decisions(head, sections, notes, tuple(form.name for form in explicit.params), _asked(explicit))


def _chosen_rows(counts: tuple[int, ...]) -> list[str]:
    """What is computed for them, beside what torch does: in a line."""
    if not counts:
        return []
    masks = "1 mask" if len(counts) == 1 else f"{len(counts)} masks"
    shared = f" (1 of {len(counts)}, where masks share rows out)" if len(counts) > 1 else ""
    return [f"  {masks}: {sum(counts):,} rows are computed, of which torch computes those that are chosen{shared}"]


def _asked(explicit: ExplicitGraph) -> dict[str, Sharding]:
    """What was stated of parameters, over their own dims."""
    graph = explicit.graph
    stated = {value: annotation.sharding for value, annotation in graph.annotations.items()}
    for node in graph.nodes:
        if node.is_annotation and node.outputs[0] in stated:
            stated.setdefault(node.inputs[0], stated[node.outputs[0]])
    return {form.name: stated[form.value] for form in explicit.params if form.value in stated}


def _gathered_at_the_boundary(explicit: ExplicitGraph) -> Iterator[str]:
    """What is gathered of arguments and results that come and go in tiles, because what the program splits is no dim of
    theirs."""
    atoms, stored = explicit.atoms, explicit.graph.stored
    for form in dict.fromkeys((*explicit.params, *leaves(explicit.result))):
        dims, shape = atoms.of[form.value], atoms.shape(form.value)
        if form.value not in stored and plain_sharding(form.sharding, dims) is None:
            whole = Sharding.of(form.sharding.mesh, len(shape), {})
            nameable = whole if form in explicit.params else made_plain(form.sharding, dims)
            received = bytes_moved(shape, form.dtype, form.sharding, nameable)
            why = f"{form.sharding} of {shape} is no layout of {form.value.type.shape}"
            yield f"  {form.name}: {received:,} bytes ({why})"
