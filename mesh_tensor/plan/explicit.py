"""ExplicitGraph: every layout change is a step of its own, nothing is implied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move

from .atoms import Atoms
from .ir import Graph, Node, Scope, Value
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


@dataclass(frozen=True, eq=False)
class Change:
    """One collective of a redistribution, or a slice: `src` becomes `dst`. It stands in the scopes of whoever asked."""

    move: Move
    src: Form
    dst: Form
    scopes: tuple[Scope, ...]
    reason: str


@dataclass(frozen=True, eq=False)
class Fill:
    """`dst` is `src` with its padding along `dims` (atoms) set to what is neutral for `op`."""

    src: Form
    dst: Form
    dims: tuple[int, ...]
    op: str
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, eq=False)
class Cast:
    """`dst` is `src` in the value's own dtype again."""

    src: Form
    dst: Form
    scopes: tuple[Scope, ...]


Step = Run | Change | Fill | Cast


@dataclass(eq=False)
class ExplicitGraph:
    """The steps of every device. `params` and `result` are forms in the layouts that values have at the boundary."""

    graph: Graph
    atoms: Atoms
    layouts: Layouts
    params: list[Form] = field(default_factory=list)
    constants: list[Form] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    result: Any = ()


def forms_in(tree: Any) -> list[Form]:
    """The forms of a tree, in order."""
    return [tree] if isinstance(tree, Form) else [form for item in tree for form in forms_in(item)]
