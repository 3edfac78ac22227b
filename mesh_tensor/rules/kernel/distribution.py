"""Distribution of parallel loops, with scalar expansion. What each iteration of a `T.Parallel` does in its own loops,

    for i in T.Parallel(n): s = 0; for k in range(m): s += X[i, k]; Y[i] = f(s)

is said for all of them, `for i: s[i] = 0`, `for k: for i: s[i] += X[i, k]`, `for i: Y[i] = f(s[i])`, so that what the
loop over k leaves can be completed before it is used. Where it is not certain that iterations know nothing of each
other, the loop stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import ir, tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import changes_nothing, leaves_kernel, leaves_loop, written
from mesh_tensor.tir.linear import linear_form, vars_of
from mesh_tensor.tir.nodes import DIVISIONS, is_const, loads, nodes
from mesh_tensor.tir.rewrite import guarded, loop_like, sequence
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .statements import Kernel, body_statements, mentions


def distributed(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel with its parallel loops around loops distributed; None if there are none. Views and prints are told in
    the order in which they are written."""
    expanded: list[tirx.Buffer] = []
    if left_views(kernel.func) or prints(kernel.func.body):
        return None

    def visit(loop: tirx.For) -> tirx.Stmt | None:
        if loop.kind != tirx.ForKind.PARALLEL:
            return None
        nest = _Nest(loop, kernel)
        if not nest.can_be_distributed():
            return loop
        expanded.extend(nest.expanded.values())
        return nest.distributed()

    body = tirx.stmt_functor.ir_transform(kernel.root.body, visit, None, ["tirx.For"])
    if body.same_as(kernel.root.body):
        return None
    return kernel.with_body(body, [*kernel.root.alloc_buffers, *expanded])


_ACCESSES = (tirx.BufferLoad, tirx.BufferStore)


class _Nest:
    """Parallel loops around a body, which an iteration runs if `guard` says so. `expanded`: of the variables with which
    an iteration hands something from one of the body's statements to another, the buffers that have one for each."""

    def __init__(self, outer: tirx.For, kernel: Kernel):
        self.kernel, self.loops, body = kernel, [outer], outer.body
        while isinstance(body, tirx.For) and body.kind == tirx.ForKind.PARALLEL:
            self.loops.append(body)
            body = body.body
        self.guard = _guard(body)
        self.body = body if self.guard is None else body.then_case
        self.vars = [loop.loop_var for loop in self.loops]
        self.bound = [bind.var for bind in nodes(self.body, tirx.Bind)]
        self.expanded: dict[tirx.Buffer | tirx.Var, tirx.Buffer] = {}

    def can_be_distributed(self) -> bool:
        """Whether there is a loop in it, and iterations know nothing of each other."""
        plain = all(isinstance(loop.extent, tirx.IntImm) and is_const(loop.min, 0) for loop in self.loops)
        if not plain or leaves_loop(self.loops[0]) or leaves_kernel(self.body):
            return False
        if any(not changes_nothing(stmt) for stmt in nodes(self.body, tirx.Evaluate, tirx.SBlockRealize)):
            return False
        if not any(isinstance(group, tirx.For) for group in self._groups(self.body)):
            return False
        return self._find_expanded() and all(map(self._is_apart, dict.fromkeys(written(self.body))))

    def distributed(self) -> tirx.Stmt:
        """The statements, each group of them in parallel loops of its own."""
        return self._distributed(_with_elements(self.body, self.expanded, self.vars))

    # -- the statements between loops ----------------------------------------------------------------------------------

    def _groups(self, body: tirx.Stmt) -> Iterator[tuple[tirx.Stmt, ...] | tirx.For]:
        """The loops that all iterations run alike, and the statements between them."""
        group: list[tirx.Stmt] = []
        for stmt in body_statements(body):
            if not self._is_common(stmt):
                group.append(stmt)
                continue
            if group:
                yield tuple(group)
                group = []
            yield stmt
        if group:
            yield tuple(group)

    def _is_common(self, stmt: tirx.Stmt) -> bool:
        """Whether the statement is a loop that all iterations of the nest run alike."""
        if not isinstance(stmt, tirx.For) or stmt.kind != tirx.ForKind.SERIAL or leaves_loop(stmt):
            return False
        return not any(loads(e) or vars_of([e], {}) & {*self.vars, *self.bound} for e in (stmt.min, stmt.extent))

    def _leaves(self, body: tirx.Stmt) -> Iterator[tirx.Stmt]:
        for group in self._groups(body):
            if isinstance(group, tirx.For):
                yield from self._leaves(group.body)
            else:
                yield sequence(group)

    def _distributed(self, body: tirx.Stmt) -> tirx.Stmt:
        return sequence(
            [
                loop_like(group, group.extent, self._distributed(group.body), start=group.min)
                if isinstance(group, tirx.For)
                else self._around(sequence(group))
                for group in self._groups(body)
            ]
        )

    def _around(self, body: tirx.Stmt) -> tirx.Stmt:
        """The nest's loops, with variables of their own, around a group."""
        fresh = {var: tirx.Var(var.name, var.dtype) for var in self.vars}
        guard = [] if self.guard is None or self._is_private(body) else [self.guard]
        body = tirx.stmt_functor.substitute(guarded(body, guard), fresh)
        for loop in reversed(self.loops):
            annotations = dict(loop.annotations)
            body = tirx.For(fresh[loop.loop_var], loop.min, loop.extent, loop.kind, body, None, annotations)
        return body

    def _is_private(self, body: tirx.Stmt) -> bool:
        """Whether statements only set what is an iteration's own, from that, and divide by no number that may be zero:
        any iteration may do so."""
        own = list(self.expanded.values())
        only = all(access.buffer in own for access in nodes(body, *_ACCESSES))
        by = [quotient.b for quotient in nodes(body, *DIVISIONS) if not is_float(quotient.dtype)]
        only = only and all(isinstance(divisor, tirx.IntImm) for divisor in by)
        return only and all(isinstance(stmt, tirx.BufferStore) for stmt in body_statements(body))

    # -- what iterations have of their own -----------------------------------------------------------------------------

    def _find_expanded(self) -> bool:
        """Find the variables; False where it is not certain that an iteration uses what it has stored itself."""
        leaves = list(self._leaves(self.body))
        for buffer in list(dict.fromkeys(access.buffer for access in nodes(self.body, *_ACCESSES))):
            accesses = _accesses(self.body, buffer)
            if self.kernel.is_param(buffer) or any(vars_of(a.indices, {}) for a in accesses):
                continue
            is_single = all(is_const(size, 1) for size in buffer.shape)
            is_alone = len(_accesses(self.kernel.root.body, buffer)) == len(accesses)
            if not is_single or not is_alone or not _is_stored_first(leaves, buffer):
                return False
            if sum(bool(_accesses(leaf, buffer)) for leaf in leaves) > 1:
                self.expanded[buffer] = self._one_each(buffer.name, buffer.dtype)
        for leaf in leaves:
            for var in (bind.var for bind in nodes(leaf, tirx.Bind)):
                if any(var in nodes(other, tirx.Var) for other in leaves if other is not leaf):
                    self.expanded[var] = self._one_each(var.name, var.dtype)
        return True

    def _one_each(self, name: str, dtype: str) -> tirx.Buffer:
        return tirx.decl_buffer([loop.extent for loop in self.loops], dtype, name, scope="local.fragment")

    def _is_apart(self, buffer: tirx.Buffer) -> bool:
        """Whether iterations have places of a buffer of their own, or the buffer is a variable."""
        accesses = _accesses(self.body, buffer)
        if not self.kernel.is_param(buffer) and not any(vars_of(access.indices, {}) for access in accesses):
            return True
        dims = zip(*(access.indices for access in accesses), strict=True)
        same = [first for first, *others in dims if all(ir.structural_equal(first, other) for other in others)]
        forms = [form for index in same if (form := linear_form(index, {})) is not None]
        # in a dim that one of the loops walks, and nothing else here, each of its iterations has places of its own
        own = {*self.vars, *self.bound, *(loop.loop_var for loop in nodes(self.body, tirx.For))}
        return all(any(form.terms.keys() & own == {var} for form in forms) for var in self.vars)


def _guard(body: tirx.Stmt) -> tirx.PrimExpr | None:
    """The condition under which an iteration does anything, if that is said of where it is."""
    is_alone = isinstance(body, tirx.IfThenElse) and body.else_case is None
    return body.condition if is_alone and not loads(body.condition) else None


def _accesses(stmt: tirx.Stmt, buffer: tirx.Buffer) -> list[tirx.BufferLoad | tirx.BufferStore]:
    return [a for a in nodes(stmt, *_ACCESSES) if a.buffer.data.same_as(buffer.data)]


def _is_stored_first(leaves: Sequence[tirx.Stmt], buffer: tirx.Buffer) -> bool:
    """Whether the first that is done with a buffer is to store to it, whatever the data are."""
    for stmt in (stmt for leaf in leaves for stmt in body_statements(leaf)):
        if _accesses(stmt, buffer):
            is_store = isinstance(stmt, tirx.BufferStore) and stmt.buffer.same_as(buffer)
            return is_store and stmt.predicate is None and not mentions(stmt.value, buffer)
    return False


def _with_elements(
    body: tirx.Stmt, expanded: dict[tirx.Buffer | tirx.Var, tirx.Buffer], at: Sequence[tirx.Var]
) -> tirx.Stmt:
    """The statement, with the element `at` of what is expanded in the place of each variable."""

    def element(node: tirx.BufferLoad | tirx.BufferStore | tirx.Bind | tirx.Var) -> tirx.PrimExpr | tirx.Stmt | None:
        if isinstance(node, tirx.Bind):
            return tirx.BufferStore(expanded[node.var], node.value, at) if node.var in expanded else None
        of = expanded.get(node if isinstance(node, tirx.Var) else node.buffer)
        if of is None:
            return None
        return tirx.BufferStore(of, node.value, at) if isinstance(node, tirx.BufferStore) else tirx.BufferLoad(of, at)

    kinds = [f"tirx.{kind}" for kind in ("BufferLoad", "BufferStore", "Bind", "Var")]
    return tirx.stmt_functor.ir_transform(body, None, element, kinds)
