"""Parts of a kernel that have nothing to do with each other: q's heads and k's in one grid, `if bx < q_heads: ... else:
...`, or in two loops of a program. As kernels of their own, each may be split as it is asked to be, although axes split
one factor of a kernel.

Programs of a grid run in any order, so those for which a condition holds may run before the others. What makes a result
is what writes it, and whatever this reads, by the writes that may reach it. Where two results have nothing in common
but what both stage on chip, each has a kernel; so has a result that programs write first, and only read afterwards, as
keys and values that are put into a cache: of all programs, before any reads. Refused are none: what is not understood
is in one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tvm import tirx

from mesh_tensor.base.joined import Joined
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.tir.double_loops import simplified
from mesh_tensor.tir.effects import changes_nothing, chosen, leaves_kernel, leaves_loop
from mesh_tensor.tir.grids import alone
from mesh_tensor.tir.linear import linear_form
from mesh_tensor.tir.nodes import is_const, nodes, used
from mesh_tensor.tir.rewrite import (
    inner,
    loop_like,
    sequence,
    statements,
    with_inner,
)
from mesh_tensor.tir.tile_ops import Copy, Fill
from mesh_tensor.tir.user_reports import is_print
from mesh_tensor.tir.views import left_views

from .live_ranges import LiveRange, LiveRanges
from .normalize import ANALYSES, with_own_variables
from .reader import read_kernel
from .sharding_rule import analyse
from .statements import Access, Kernel, Statement

_MOST = 8  # conditions of one grid loop
_LEAVES = ["tirx.BufferStore", "tirx.Evaluate"]
_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def independent_parts(func: tirx.PrimFunc, asked: Mapping[str, Sharding]) -> Iterator[tuple[tirx.PrimFunc, ...]]:
    """Ways to cut a normalized kernel into parts that its layouts ask to be split differently, each with the parameters
    that it uses, in the order of their results; none if it is one, or has parameters that no part uses."""
    if not _is_known(read_kernel(func)):
        return
    for way in dict.fromkeys((func, _with_loops_apart(func))):
        parts = [part for piece in _by_programs(way) for part in _by_results(piece, asked)]
        used_by_some = {param for part in parts for param in part.params}
        if len(parts) > 1 and used_by_some.issuperset(func.params):
            yield tuple(piece for part in parts for piece in _by_programs(part))


def _is_known(kernel: Kernel) -> bool:
    """Whether all statements are understood, and only compute what parameters become."""
    if left_views(kernel.func) or leaves_kernel(kernel.root.body) or nodes(kernel.root.body, tirx.While):
        return False
    if any(buffer.scope() == "global" for buffer in kernel.on_chip):
        return False
    return all(_is_plain(statement) for statement in kernel.statements)


def _is_plain(statement: Statement) -> bool:
    if statement.unknown or statement.may_be_skipped or is_print(statement.node):
        return False
    return statement.write is not None or isinstance(statement.node, tirx.Bind) or changes_nothing(statement.node)


# -- by the programs of the grid ---------------------------------------------------------------------------------------


@made_once(ANALYSES)
def _by_programs(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, ...]:
    """The kernels of the programs for which conditions on their number hold, and do not, where they write to different
    parameters; programs that write to none are left out."""
    kernel = read_kernel(func)
    for loop in (loop.node for loop in kernel.grid):
        is_plain = loop is not None and loop.thread_binding is not None
        places = _places(loop) if is_plain else []
        if not places:
            continue
        made = [_alone(piece) for piece in _of_programs(func, loop, places)]
        results = [name for piece in made for name in _results(read_kernel(piece))]
        if len(set(results)) == len(results):
            return tuple(part for piece in made if _results(read_kernel(piece)) for part in _by_programs(piece))
    return (func,)


def _of_programs(func: tirx.PrimFunc, loop: tirx.For, places: Sequence[int]) -> Iterator[tirx.PrimFunc]:
    for piece in _pieces(loop, places):
        body = tirx.stmt_functor.ir_transform(
            func.body, None, lambda node, piece=piece: piece if node.same_as(loop) else None, ["tirx.For"]
        )
        yield func.with_body(_decided(body))


def _pieces(loop: tirx.For, places: Sequence[int]) -> Iterator[tirx.For]:
    """The loop's iterations between these places, each piece counted from 0."""
    for start, end in pairwise([0, *places, int(loop.extent)]):
        body = tirx.stmt_functor.substitute(loop.body, {loop.loop_var: loop.loop_var + start}) if start else loop.body
        yield loop_like(loop, end - start, body)


def _places(loop: tirx.For) -> list[int]:
    """The iterations at which a condition on their number alone may change."""
    if not is_const(loop.min, 0) or not isinstance(loop.extent, tirx.IntImm) or loop.step is not None:
        return []
    conditions = [stmt.condition for stmt in nodes(loop.body, tirx.IfThenElse)]
    conditions += [asked[0] for node in nodes(loop.body, tirx.Call, tirx.Select) if (asked := chosen(node))]
    compared = [node for condition in conditions for node in nodes(condition, *_COMPARISONS)]
    found = {at for node in compared for at in _bounds(node, loop.loop_var)}
    places = sorted(at for at in found if 0 < at < int(loop.extent))
    return places if len(places) <= _MOST else []


def _bounds(node: tirx.PrimExpr, var: tirx.Var) -> tuple[int, ...]:
    """Where a comparison of a loop's variable with a number changes."""
    form = linear_form(node.a - node.b, {}) if node.a.dtype == var.dtype else None
    if form is None or form.terms.keys() != {var} or abs(form.terms[var]) != 1:
        return ()
    at = -form.terms[var] * form.const
    if isinstance(node, (tirx.EQ, tirx.NE)):
        return at, at + 1
    is_first = isinstance(node, (tirx.LT, tirx.GE)) == (form.terms[var] > 0)
    return (at if is_first else at + 1,)


def _decided(body: tirx.Stmt) -> tirx.Stmt:
    """The body without conditions that always hold, or never do."""

    def decided(node: tirx.IfThenElse | tirx.Call | tirx.Select) -> tirx.Stmt | tirx.PrimExpr | None:
        if isinstance(node, tirx.IfThenElse):
            condition, then, otherwise = node.condition, node.then_case, node.else_case or tirx.Evaluate(0)
        else:
            condition, then, otherwise = chosen(node) or [None, None, None]
        if not isinstance(condition, tirx.IntImm):
            return None
        return then if int(condition) else otherwise

    return tirx.stmt_functor.ir_transform(
        simplified(body), None, decided, ["tirx.IfThenElse", "tirx.Call", "tirx.Select"]
    )


# -- by the iterations of loops ----------------------------------------------------------------------------------------


def _with_loops_apart(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with a loop for the iterations for which a condition on their number holds, and one for the others. Of
    parallel loops in each other, any may be the one."""
    kernel = read_kernel(func)
    body = _loops_apart(kernel.root.body)
    if body.same_as(kernel.root.body):
        return func
    made = with_own_variables(kernel.with_body(body))
    return made.with_body(_decided(made.body))


def _loops_apart(stmt: tirx.Stmt) -> tirx.Stmt:
    nest = [stmt] if isinstance(stmt, tirx.For) and not leaves_loop(stmt) else []
    while nest and all(isinstance(loop, tirx.For) and _is_parallel(loop) for loop in (nest[-1], nest[-1].body)):
        nest.append(nest[-1].body)
    for at, loop in enumerate(nest):
        if places := _places(loop):
            pieces = list[tirx.Stmt](_pieces(loop, places))
            for outer in reversed(nest[:at]):
                pieces = [loop_like(outer, outer.extent, piece) for piece in pieces]
            return sequence([_loops_apart(piece) for piece in pieces])
    return with_inner(stmt, _loops_apart) if nodes(stmt, tirx.For) else stmt


def _is_parallel(loop: tirx.For) -> bool:
    return loop.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)


# -- by what they write ------------------------------------------------------------------------------------------------


def _by_results(func: tirx.PrimFunc, asked: Mapping[str, Sharding]) -> Iterator[tirx.PrimFunc]:
    """A kernel for each group of results; the kernel, if it is one."""
    kernel = read_kernel(func)
    first = _written_first(kernel)
    slices = _slices(kernel, first)
    groups = _groups(func, slices, asked)
    if first and not _is_in_order(groups, slices, first):
        slices = _slices(kernel, set())
        groups = _groups(func, slices, asked)
    if len(groups) < 2:
        yield func
        return
    for group in groups:
        kept = {statement for name in group for statement in slices[name]}
        yield _alone(_only(kernel, kept))


def _results(kernel: Kernel) -> list[str]:
    return [name for name, buffer in kernel.params.items() if any(s.writes(buffer) for s in kernel.statements)]


def _written_first(kernel: Kernel) -> set[str]:
    """The results that a program reads after it has written all of its own to them; none of which it reads what another
    program writes, as far as that is known: where data say, programs would see what was there before, or not."""
    found = set()
    for name in _results(kernel):
        buffer = kernel.params[name]
        writers = [s for s in kernel.statements if s.writes(buffer)]
        reads = [(s, a) for s in kernel.statements for a in s.reads if a.buffer.same_as(buffer)]
        last = max(s.top for s in writers)
        is_first = reads and all(last < s.top for s, _ in reads) and all(s.op is None for s in writers)
        if is_first and not any(_are_of_others(read, s.target, kernel) for _, read in reads for s in writers):
            found.add(name)
    return found


def _are_of_others(read: Access, written: Access, kernel: Kernel) -> bool:
    """Whether a program reads places of other programs, as the indices say that are sums of loops' variables."""
    grid = {loop.var for loop in kernel.grid}
    for a, b in zip(read.forms, written.forms, strict=True):
        if a is None or b is None:
            continue
        differs = any((a - b).terms.get(var) for var in grid)
        if differs or (a.terms.keys() | b.terms.keys() <= grid and a.const != b.const):
            return True
    return False


def _is_in_order(groups: Sequence[Sequence[str]], slices: Mapping[str, set[Statement]], first: set[str]) -> bool:
    """Whether no group reads what a later one writes."""
    for at, group in enumerate(groups):
        read = {a.buffer.name for name in group for s in slices[name] for a in s.reads}
        if any(name in first and name in read for later in groups[at + 1 :] for name in later):
            return False
    return True


def _slices(kernel: Kernel, first: set[str]) -> dict[str, set[Statement]]:
    """What makes each result: what writes it, and, one after the other, what writes what is read for that; but for what
    is written `first`."""
    ranges = LiveRanges(kernel)
    results = {live_range.buffer.name: live_range for live_range in ranges.all if live_range.is_param}
    found: dict[str, set[Statement]] = {}
    for name in _results(kernel):
        left, seen = [results[name]], set[LiveRange]()
        found[name] = set()
        while left:
            live_range = left.pop()
            if live_range in seen:
                continue
            seen.add(live_range)
            for statement, _ in live_range.writes:
                found[name].add(statement)
                read = [ranges.of(access) for access in statement.reads]
                left += [r for r in read if not (r.is_param and r.buffer.name in first - {name})]
    return found


def _groups(
    func: tirx.PrimFunc, slices: Mapping[str, set[Statement]], asked: Mapping[str, Sharding]
) -> list[list[str]]:
    """The results that are made together: of one another, by work that they have in common, or in layouts that ask for
    the same factors."""
    joined = Joined[str]()
    for name, made_of in slices.items():
        joined.root(name)
        for other, statements_ in slices.items():
            if any(not _is_staging(statement) for statement in made_of & statements_):
                joined.join(other, name)
    if len(joined.sets()) < 2:
        return joined.sets()
    groups: list[tuple[list[str], list[set[object]]]] = []
    for names in joined.sets():
        wanted = _wanted(func, set[Statement]().union(*(slices[name] for name in names)), asked)
        for group, others in groups:
            if all(not a or not b or a == b for a, b in zip(wanted, others, strict=True)):
                group += names
                others[:] = [a | b for a, b in zip(wanted, others, strict=True)]
                break
        else:
            groups.append((names, wanted))
    return [names for names, _ in groups]


def _is_staging(statement: Statement) -> bool:
    """Whether a statement only puts something on chip, which takes next to nothing."""
    on_chip = statement.write is None or statement.write.buffer.scope() != "global"
    return on_chip and statement.op is None and isinstance(statement.tile_op, (Copy, Fill, type(None)))


def _wanted(func: tirx.PrimFunc, statements_: set[Statement], asked: Mapping[str, Sharding]) -> list[set[object]]:
    """Per axis, the factors that it is asked to split of what some statements access; a dim without one is its own."""
    analysis = analyse(func)
    accessed = {access.buffer.name for statement in statements_ for access in statement.accesses}
    mesh = next(iter(asked.values())).mesh if asked else ()
    found: list[set[object]] = []
    for axis in mesh:
        dims = [(name, dim) for name in asked if name in accessed and (dim := asked[name].dim_of(axis)) is not None]
        found.append({analysis.factor_of(*dim) or dim for dim in dims})
    return found


def _only(kernel: Kernel, kept: set[Statement]) -> tirx.PrimFunc:
    """The kernel without statements that write something, and are none of these."""
    others = {s.node for s in kernel.statements if s.write is not None} - {s.node for s in kept}

    def dropped(stmt: tirx.Stmt) -> tirx.Stmt | None:
        return tirx.Evaluate(0) if stmt in others else None

    body = tirx.stmt_functor.ir_transform(kernel.root.body, dropped, None, _LEAVES)
    return kernel.with_body(body)


def _alone(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without loops, bindings, buffers and parameters of which nothing is left."""
    kernel = read_kernel(func)
    body = _without_idle(kernel.root.body)
    while unused := {bind for bind in nodes(body, tirx.Bind) if bind.var not in used(body)}:
        body = _without_idle(_without(body, unused))
    made = kernel.with_body(body, [buffer for buffer in kernel.root.alloc_buffers if buffer.data in used(body)])
    outer = made.body.block.body if isinstance(made.body, tirx.SBlockRealize) else made.body
    return alone(made, statements(outer), {})


def _without(body: tirx.Stmt, binds: set[tirx.Bind]) -> tirx.Stmt:
    def dropped(bind: tirx.Bind) -> tirx.Stmt | None:
        return tirx.Evaluate(0) if bind in binds else None

    return tirx.stmt_functor.ir_transform(body, None, dropped, ["tirx.Bind"])


def _without_idle(stmt: tirx.Stmt) -> tirx.Stmt:
    """The statement without what does nothing."""
    if isinstance(stmt, tirx.SeqStmt):
        return sequence([part for part in map(_without_idle, statements(stmt)) if not _is_idle(part)])
    held = [_without_idle(part) for part in inner(stmt)]
    if not held or isinstance(stmt, tirx.SBlockRealize):
        return with_inner(stmt, _without_idle)
    if all(map(_is_idle, held)):
        return tirx.Evaluate(0)
    if isinstance(stmt, tirx.IfThenElse) and _is_idle(held[-1]):
        return tirx.IfThenElse(stmt.condition, held[0], None)
    return with_inner(stmt, _without_idle)


def _is_idle(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)
