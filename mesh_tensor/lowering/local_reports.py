"""Prints and assertions on one device.

A print is made local without the analysis having seen it: it prints what this device holds, at global positions, and
which device that is. A position that is not known globally is the tile's, and the text says so. An assertion is a use
like any other, and is not made of what lies past the tile's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement, body_statements
from mesh_tensor.tir.linear import Linear, as_expr, linear_form
from mesh_tensor.tir.rewrite import loop_like, region_call, reshaped, sequence, with_args
from mesh_tensor.tir.user_reports import assert_call, message_only, print_call, printed_buffers

from .expressions import ValueRewriter, replace_outer_loads
from .splits import DeviceCoordinates, Shrink, Split

_OF_THE_TILE = " (position in this device's tile)"
_ZERO = tirx.IntImm("int32", 0)


class LocalReports:
    """Makes a kernel's prints and assertions those of one device."""

    def __init__(
        self,
        analysis: Analysis,
        splits: Sequence[Split],
        shrink: Shrink,
        values: ValueRewriter,
        device: DeviceCoordinates,
    ):
        self._analysis, self._splits, self._shrink, self._values = analysis, splits, shrink, values
        self._device = device
        self._staged: dict[tirx.Buffer, tirx.Buffer] = {}

    # -- prints --------------------------------------------------------------------------------------------------------

    def print(self, stmt: tirx.AttrStmt) -> tirx.Stmt:
        """All of one print, as this device prints it. How a parameter lies that is used nowhere else is not known."""
        kernel = self._analysis.kernel
        unused = sorted(b.name for b in printed_buffers(stmt) if kernel.is_param(b) and not kernel.uses(b))
        if unused:
            return message_only(f"{', '.join(unused)}: used nowhere else here, not printed")
        parts = [self._part(part) for part in body_statements(stmt.body)]
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, sequence(parts))

    def _part(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.IfThenElse):
            return tirx.IfThenElse(stmt.condition, self._part(stmt.then_case), None)
        if isinstance(stmt, tirx.For):
            call = print_call(stmt.body)
            assert call is not None
            if isinstance(call.args[4], tirx.BufferLoad):
                return self._elements(call)
            return loop_like(stmt, stmt.extent, self._value(call))
        call = print_call(stmt)
        return self._stage(stmt) if call is None else self._value(call)

    def _stage(self, stmt: tirx.Evaluate) -> tirx.Stmt:
        """The copy of a whole fragment to the shared memory that it is printed from."""
        source, stage = (region.args[0].buffer for region in list(stmt.value.args)[:2])
        local = self._shrink.buffer(source)
        self._staged[stage] = source
        if not local.same_as(source):
            self._shrink.buffers[stage] = reshaped(stage, local.shape)
        regions = [
            region_call(buffer, [_ZERO] * len(local.shape), local.shape, mode)
            for buffer, mode in ((local, 1), (self._shrink.buffer(stage), 2))
        ]
        return with_args(stmt, [*regions, *list(stmt.value.args)[2:]])

    def _elements(self, call: tirx.Call) -> tirx.Stmt:
        """Every element of a buffer that this device holds."""
        buffer = call.args[4].buffer
        local, owners = self._shrink.buffer(buffer), self._owners(self._staged.get(buffer, buffer))
        count: tirx.PrimExpr = tirx.IntImm("int32", 1)
        for size in local.shape:
            count = count * size
        position, index = tirx.Var("i", "int32"), list[tirx.PrimExpr]()
        rest: tirx.PrimExpr = position
        for size in reversed(list(local.shape)):
            index.insert(0, tirx.floormod(rest, size))
            rest = tirx.floordiv(rest, size)
        inside = [index[dim] < split.valid for dim, split in owners.items() if not split.even]
        where = [i + owners[dim].offset if dim in owners else i for dim, i in enumerate(index)]
        name = call.args[2] if buffer in self._staged else tirx.StringImm(buffer.name)
        args = [*list(call.args)[:2], name, position, tirx.BufferLoad(local, index), *where]
        return tirx.For(position, 0, count, tirx.ForKind.SERIAL, self._guarded(inside, self._call(call, args)))

    def _value(self, call: tirx.Call) -> tirx.Stmt:
        args, inside, exact = list(call.args), [], True
        for place in range(2, len(args)):
            args[place], conditions, known = self._expr(args[place])
            inside += conditions
            exact = exact and known
        if not exact:
            args[1] = tirx.StringImm(args[1].value + _OF_THE_TILE)
        return self._guarded(inside, self._call(call, args))

    def _call(self, call: tirx.Call, args: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        return tirx.Evaluate(tirx.Call(call.dtype, call.op, [*args, *self._here()]))

    def _here(self) -> list[tirx.PrimExpr]:
        """Which device this is: names of axes, each with the coordinate."""
        mesh = self._device.mesh
        axes = [axis for axis in mesh.axis_names if mesh.size(axis) > 1]
        return [part for axis in axes for part in (tirx.StringImm(axis), self._device[axis])]

    def _expr(self, expr: tirx.PrimExpr) -> tuple[tirx.PrimExpr, list[tirx.PrimExpr], bool]:
        """The value on this device, where it has one, and whether every position in it is known globally."""
        conditions: list[tirx.PrimExpr] = []
        loaded: dict[tirx.Var, tirx.PrimExpr] = {}
        exact = True

        def hide(load: tirx.BufferLoad) -> tirx.PrimExpr:
            nonlocal exact
            local, inside, known = self._load(load)
            conditions.extend(inside)
            exact = exact and known
            var = tirx.Var("load", load.dtype)
            loaded[var] = local
            return var

        skeleton, known = self._global(replace_outer_loads(expr, hide))
        return substitute(skeleton, loaded) if loaded else skeleton, conditions, exact and known

    def _load(self, load: tirx.BufferLoad) -> tuple[tirx.PrimExpr, list[tirx.PrimExpr], bool]:
        local, owners = self._shrink.buffer(load.buffer), self._owners(load.buffer)
        is_param = self._analysis.kernel.is_param(load.buffer)
        indices, conditions, exact = [], [], True
        for dim, (index, size) in enumerate(zip(load.indices, local.shape, strict=True)):
            if dim not in owners and not is_param:
                indices.append(index)
                continue
            here, inside, known = self._expr(index)
            exact = exact and known
            if dim in owners and known:
                here = self._analysis.kernel.analyzer.simplify(here - owners[dim].offset)
            end = owners[dim].valid if dim in owners else size
            conditions += [*inside, here >= 0, here < end]
            indices.append(here)
        return tirx.BufferLoad(local, indices), conditions, exact

    def _owners(self, buffer: tirx.Buffer) -> Mapping[int, Split]:
        """The dims of a buffer of which this device has a tile, with what splits them."""
        if self._analysis.kernel.is_param(buffer):
            return {dim: s for s in self._splits for name, dim in s.factor.dims if name == buffer.name}
        found: dict[int, Split] = {}
        if self._shrink.buffer(buffer).same_as(buffer):
            return found
        for live_range in self._analysis.coordinates.ranges.all:
            for dim in range(len(buffer.shape) if live_range.buffer.same_as(buffer) else 0):
                entry = self._analysis.coordinates.of_node((live_range, dim))
                if entry is not None and entry[0] in self._shrink.splits and not entry[1].terms:
                    found[dim] = self._shrink.splits[entry[0]]
        return found

    def _global(self, expr: tirx.PrimExpr) -> tuple[tirx.PrimExpr, bool]:
        """The expression at global coordinates and True, or as it is and False where it has parts of one only."""
        used = set(tirx.analysis.undefined_vars(expr))
        offsets, total = dict[tirx.Var, tirx.PrimExpr](), expr
        for split in self._splits:
            forms = self._analysis.coordinates.forms[split.factor]
            here = used & {var for form in forms for var in form.terms}
            if split.factor.aligned is not None or all(any(f.terms == {v: 1} for f in forms) for v in here):
                offsets |= {var: self._values.offsets[var] for var in here if var in self._values.offsets}
                continue
            steps = next((k for form in forms if (k := self._steps(expr, form, here)) is not None), None)
            if steps is None:
                return expr, False
            total = total + split.offset * steps
        return substitute(total, offsets), True

    def _steps(self, expr: tirx.PrimExpr, form: Linear, used: set[tirx.Var]) -> int | None:
        """How often the coordinate is in the expression, if that has whole blocks of it and `used` makes them."""
        linear = linear_form(expr, self._analysis.kernel.binds)
        outer, block = form.ordered[0]
        if linear is None or not used <= form.terms.keys() or linear.terms.get(outer, 0) % block:
            return None
        steps = linear.terms.get(outer, 0) // block
        return steps if steps and all(linear.terms.get(v, 0) == steps * form.terms[v] for v in used) else None

    # -- assertions ----------------------------------------------------------------------------------------------------

    def assertion(self, statement: Statement) -> tirx.Stmt:
        """The assertion about this device's part."""
        node = statement.node
        if isinstance(node, tirx.AssertStmt):
            args = [node.condition, tirx.StringImm("".join(part.value for part in node.message_parts))]
            call = tirx.call_intrin("void", ir.Op.get("tl.device_assert_with_msg"), *args)
        else:
            call = assert_call(node)
            assert call is not None
        args = [self._values.rewrite(call.args[0]), *list(call.args)[1:], *self._here()]
        return self._guarded(self._inside(statement), tirx.Evaluate(tirx.Call(call.dtype, call.op, args)))

    def _inside(self, statement: Statement) -> list[tirx.PrimExpr]:
        coordinates = self._analysis.coordinates
        forms, found = coordinates.of_statement(statement), []
        for split in self._splits:
            form = forms.get(split.factor) or coordinates.around(statement, split.factor)
            if form is not None and (not split.even or self._shrink.overruns(split)):
                found.append(as_expr(form) < split.valid)
        return found

    def _guarded(self, conditions: Sequence[tirx.PrimExpr], stmt: tirx.Stmt) -> tirx.Stmt:
        for condition in conditions:
            if not self._analysis.kernel.analyzer.can_prove(condition):
                stmt = tirx.IfThenElse(condition, stmt, None)
        return stmt
