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

`left_partial` leaves results as their parts: the sums that a plan completes at its end, for callers who add up several
of them and complete that once.

    dW_parts = einsum(X, dY)                dW_parts = einsum(X, dY)
    dW = all_reduce(dW_parts)
    return dW                               return dW_parts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from mesh_tensor.base.collectives import BETWEEN
from mesh_tensor.base.placement import Partial, Replicate
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move

from .atoms import Atoms
from .ir import Graph, Node, Scope, Value, leaves, map_tree
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
