"""The coordinates of a kernel: where, in which factors, its statements and its on-chip buffers lie."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.tir.linear import Linear

from .factor_derivation import Node, derive
from .factors import Factor
from .live_ranges import LiveRanges
from .statements import Access, Kernel, Statement


class Coordinates:
    """The kernel's `factors`, and what is known of every access and live range in them.

    `detached`: why some parameters' dims have no factor. `forms`: the distinct coordinates in each factor."""

    def __init__(self, kernel: Kernel, ranges: LiveRanges):
        self.kernel, self.ranges = kernel, ranges
        self._derivation, self.detached = derive(kernel, ranges)
        self.factors = self._derivation.factors
        self.forms = self._collect_forms()
        self._loop_forms = {factor: self._by_innermost_loop(forms) for factor, forms in self.forms.items()}

    def of_node(self, node: Node) -> tuple[Factor, Linear] | None:
        """The factor and base of a live range's dim, or None where it has none."""
        return self._derivation.types.get(node)

    def of_access(self, access: Access, dim: int) -> tuple[Factor, Linear] | None:
        """The factor that an access's index in `dim` walks, and the coordinate."""
        return self._derivation.coordinate(access, dim)

    def of_statement(self, statement: Statement) -> dict[Factor, Linear]:
        """Every factor that the statement has a coordinate in."""
        found: dict[Factor, Linear] = {}
        for access in statement.accesses:
            for dim in range(len(access.indices)):
                entry = self.of_access(access, dim)
                if entry is not None:
                    found.setdefault(*entry)
        return found

    def walks(self, access: Access, factor: Factor) -> bool:
        """Whether one of the access's indices walks the factor."""
        entries = (self.of_access(access, dim) for dim in range(len(access.indices)))
        return any(entry is not None and entry[0] is factor for entry in entries)

    def around(self, statement: Statement, factor: Factor) -> Linear | None:
        """The coordinate in the factor that the loops around a statement make, if they are a nest over it."""
        inner = self._loop_forms[factor]
        own = statement.vars
        for loop in statement.loops:
            form = inner.get(loop.var)
            if form is not None and set(form.terms) <= own:
                return form
        return None

    def _collect_forms(self) -> dict[Factor, list[Linear]]:
        forms: dict[Factor, dict[tuple, Linear]] = {f: {} for f in self.factors}
        for statement in self.kernel.statements:
            for factor, form in self.of_statement(statement).items():
                forms[factor].setdefault(form.key, form)
        return {factor: list(distinct.values()) for factor, distinct in forms.items()}

    def _by_innermost_loop(self, forms: list[Linear]) -> dict[tirx.Var, Linear]:
        """The coordinates that are made of the kernel's own loops."""
        found: dict[tirx.Var, Linear] = {}
        for form in forms:
            if form.terms and all(self.kernel.loops[v].kind != "tile" for v in form.terms):
                found.setdefault(form.ordered[-1][0], form)
        return found
