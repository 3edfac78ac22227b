"""ExplicitGraph: a Graph whose values have layouts, where every change of layout is a step of its own and nothing is
implied.

Whatever its kind, a step says

    inputs       the forms that it takes
    outputs      the forms that it makes
    scopes       the calls that it stands in
    where        the binding that it is of, or the form that it makes
    node         the node that it runs, if it runs one
    runs_kernel  whether that is a kernel
    mark         what of a loop it marks, if it does
    move         the collective that it is, if it is one
    kind         all that its calls on tiles depend on, but for the layouts of its forms

Two rewrites of such graphs stand here, too. `left_partial` leaves results as their parts: the sums that a plan
completes at its end, for callers who add up several of them and complete that once.

    dW_parts = einsum(X, dY)                dW_parts = einsum(X, dY)
    dW = all_reduce(dW_parts)
    return dW                               return dW_parts

By `gathered_first`, what is gathered of a transposed tensor is gathered of the tensor itself.

    w_t = permute_dims(w)                   w_whole = all_gather(w)
    w_t_whole = all_gather(w_t)             w_t_whole = permute_dims(w_whole)

So a weight that is split by rows arrives as it was sent, is never copied transposed, and may be on its way as soon as
it is there; products take the transpose with them (`program.fuse`). What is needed again at once, as the last layer's
weight is by its gradient, is not gathered again, and what devices had whole a moment ago isn't either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mesh_tensor.annotations.names import Fresh
from mesh_tensor.base.collectives import BETWEEN
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.placement import Partial, Replicate, Shard
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.rules.operator.cost import class_of

from .atoms import Atoms
from .ir import Graph, Node, Scope, Scopes, Value, leaves, map_tree
from .propagate import Layouts


@dataclass(frozen=True, eq=False)
class Form:
    """A value in one layout (over its atoms), which may be partial. `dtype` is wider than the value's while the parts
    of a low-precision sum wait to be added."""

    name: str
    value: Value
    sharding: Sharding
    dtype: str


@dataclass(frozen=True, eq=False)
class Run:
    """Devices run a node on its operands' forms. `split`: axis -> factor."""

    node: Node
    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...]
    split: dict[str, str]

    move = None

    @property
    def runs_kernel(self) -> bool:
        return self.node.kernel is not None

    @property
    def where(self) -> str:
        return self.node.where

    @property
    def scopes(self) -> tuple[Scope, ...]:
        return self.node.scopes

    @property
    def mark(self) -> str:
        return self.node.mark

    @property
    def kind(self) -> tuple:
        return self.node.call.kind


@dataclass(frozen=True, eq=False)
class _OfOneForm:
    """`dst` is made of `src`, a form of the same value. It stands in the scopes of whoever asked."""

    src: Form
    dst: Form
    scopes: tuple[Scope, ...]

    node = None
    mark = ""
    runs_kernel = False

    @property
    def where(self) -> str:
        return self.dst.name

    @property
    def inputs(self) -> tuple[Form, ...]:
        return (self.src,)

    @property
    def outputs(self) -> tuple[Form, ...]:
        return (self.dst,)


@dataclass(frozen=True, eq=False)
class Change(_OfOneForm):
    """One collective of a redistribution, or a slice: `src` becomes `dst`."""

    move: Move
    reason: str

    @property
    def kind(self) -> tuple:
        return self.move.kind, self.move.axes


@dataclass(frozen=True, eq=False)
class Fill(_OfOneForm):
    """`dst` is `src` with its padding along `dims` (atoms) set to what is neutral for `op`."""

    dims: tuple[int, ...]
    op: str

    move = None

    @property
    def kind(self) -> tuple:
        return self.dims, self.op


@dataclass(frozen=True, eq=False)
class Cast(_OfOneForm):
    """`dst` is `src` in the value's own dtype again."""

    move = None
    kind = ()


ExplicitStep = Run | Change | Fill | Cast


@dataclass(eq=False)
class ExplicitGraph:
    """The steps of every device. `params` and `result` are forms in the layouts that values have at the boundary."""

    graph: Graph
    atoms: Atoms
    layouts: Layouts
    params: list[Form] = field(default_factory=list)
    constants: list[Form] = field(default_factory=list)
    steps: list[ExplicitStep] = field(default_factory=list)
    result: Any = ()


def completed_last(explicit: ExplicitGraph) -> dict[str, Change]:
    """By the names of results: the sum over devices that ends it, and that nothing else takes."""
    completion = BETWEEN[Partial, Replicate].name
    taken = Counter(form for step in explicit.steps for form in step.inputs)
    results = {form for form in leaves(explicit.result) if not taken[form]}
    return {
        step.dst.name: step
        for step in explicit.steps
        if isinstance(step, Change) and step.dst in results and (step.move.kind, step.move.op) == (completion, "sum")
    }


def left_partial(explicit: ExplicitGraph, names: Collection[str]) -> ExplicitGraph:
    """The same without the last sums of these results, which are then the parts."""
    found = completed_last(explicit)
    last = {found[name] for name in names}
    before = {step.dst: step.src for step in last}
    layouts = {step.dst.value: step.src.sharding for step in last}
    return replace(
        explicit,
        layouts=replace(explicit.layouts, of={**explicit.layouts.of, **layouts}),
        steps=[step for step in explicit.steps if step not in last],
        result=map_tree(explicit.result, lambda form: before.get(form, form)),
    )


_ALL_GATHER = BETWEEN[Shard, Replicate].name
_AGAIN = CPU.tuning.products_ahead  # products after which what was gathered is still there


def gathered_first(made: ExplicitGraph) -> ExplicitGraph:
    """The same graph; transposes whose results nothing takes any more are left in."""
    return replace(made, steps=_Swaps(made).steps)


class _Swaps:
    def __init__(self, made: ExplicitGraph) -> None:
        self._transposes = {
            step.outputs[0]: step
            for step in made.steps
            if step.node is not None and step.node.call.name == "permute_dims"
        }
        # By value, layout, dtype and scopes: when it was made so, and as what.
        self._known: dict[tuple[Value, Sharding, str, Scopes], tuple[int, Form]] = {}
        self._products = 0
        forms = [form for step in made.steps for form in step.outputs]
        taken = [form.name for form in (*made.params, *made.constants, *forms)]
        self._fresh = Fresh([*taken, *(value.name for value in made.graph.values())])
        self.steps = [new for step in made.steps for new in self._noted(step)]

    def _noted(self, step: ExplicitStep) -> Iterator[ExplicitStep]:
        """What the step becomes, of which the results are known from there on."""
        for new in self._swapped(step):
            yield new
            for form in new.outputs:
                self._known[form.value, form.sharding, form.dtype, new.scopes] = self._products, form

    def _swapped(self, step: ExplicitStep) -> Iterator[ExplicitStep]:
        """The step, or the gather of what was transposed, then the transposes."""
        if step.node is not None:
            self._products += class_of(step.node.call.name) == "product"
        source = self._transposed(step)
        if source is None or step.move is None:
            yield step
            return
        (dim,) = {p.dim for axis in step.move.axes if isinstance(p := source.sharding.placement(axis), Shard)}
        sharding = source.sharding
        for axis in step.move.axes:
            sharding = sharding.with_replicate(axis)
        at, whole = self._known.get((source.value, sharding, source.dtype, step.scopes), (0, None))
        if whole is None or self._products - at > _AGAIN:
            whole = Form(self._fresh.name(source.value.name), source.value, sharding, source.dtype)
            move = replace(step.move, after=sharding, src_dim=dim)
            yield from self._noted(Change(source, whole, step.scopes, move, step.reason))
        run = self._transposes[step.src]
        split = {axis: factor for axis, factor in run.split.items() if axis not in step.move.axes}
        yield Run(run.node, (whole,), (step.dst,), split)

    def _transposed(self, step: ExplicitStep) -> Form | None:
        """What is gathered after it was transposed, if it lies so that it can be before."""
        if step.move is None or step.move.kind != _ALL_GATHER or step.src not in self._transposes:
            return None
        (source,) = self._transposes[step.src].inputs
        placements = {source.sharding.placement(axis) for axis in step.move.axes}
        is_split = len(placements) == 1 and isinstance(next(iter(placements)), Shard)
        return source if is_split and not source.sharding.partial else None
