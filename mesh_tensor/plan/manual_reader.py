"""ManualReader: the nodes of a manual computation, and of the collectives in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvm import relax

from mesh_tensor.annotations.manual import Manual, is_manual, manual_text
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import tensor_infos, tensor_types

from .ir import Scopes, Tree, Value, leaves
from .manual import Region, check_types, comm_in, is_edge

if TYPE_CHECKING:
    from .reader import GraphReader


class ManualReader:
    """Reads what is bound in `function`, in these scopes and this region; `expression` reads what calls take."""

    def __init__(
        self,
        reader: GraphReader,
        function: str,
        scopes: Scopes,
        region: Region | None,
        expression: Callable[[relax.Expr, str], Tree],
    ) -> None:
        self._reader, self._function, self._scopes = reader, function, scopes
        self._region, self._expression = region, expression

    def read(self, expr: relax.Call, name: str) -> Tree:
        """What a manual computation gives, or a collective in one.

        Raises:
            MeshTensorError: axes, tiles or groups are not as they have to be, or a collective stands outside of one.
        """
        if is_manual(expr):
            return self._manual(expr, name)
        return self._edge(expr, name) if is_edge(expr) else self._collective(expr, name)

    def _edge(self, expr: relax.Call, name: str) -> Tree:
        """What leads into what devices have of their own, or out of it."""
        where = f"{self._function}.{name}"
        (value,) = self._values(expr.args[1], name)
        made = self._reader.devices(self._function, name, self._scopes).edge(expr, value, where)
        self._reader.manual.update(axis for one in (value, made) for axis, _ in self._reader.varying.get(one, ()))
        check_types(f"{where}: the call says", [made.type], tensor_types(expr.struct_info, where))
        return made

    def _manual(self, expr: relax.Call, name: str) -> Tree:
        """What a manual computation gives: its function on tiles."""
        where = f"{self._function}.{name}"
        args = [self._expression(arg, name) for arg in expr.args[1:-1]]
        results = tensor_types(expr.struct_info, where)
        given = [arg for arg in args if isinstance(arg, Value)]
        if len(given) < len(args):
            refuse("a manual computation takes tensors, no tuples", where=where, fix="pass their fields")
        ndims = [value.type.ndim for value in given], [one.ndim for one in results]
        stated = Manual.parse(manual_text(expr), *ndims, where)
        region = Region.inside(self._region, stated.axes, self._reader.mesh, where)
        self._reader.manual.update(region.axes)
        devices = self._reader.devices(self._function, name, self._scopes)
        pairs = enumerate(zip(given, stated.inputs, strict=True))
        tiles = [devices.tile(value, one, f"{where}: operand {n}, {value.name!r},") for n, (value, one) in pairs]
        taken = self._reader.sized(self._reader.function(stated.body), tiles).params[:]
        check_types(f"{where}: {stated.body!r} takes", [one.type for one in tiles], _types(taken, where))
        made = leaves(self._reader.enter(stated.body, list(tiles), self._scopes, region))
        if len(made) != len(results):
            refuse(f"{stated.body!r} gives {len(made)} tensors, but the call says {len(results)}", where=where)
        ends = enumerate(zip(made, stated.outputs, strict=True))
        wholes = [devices.whole(value, one, f"{where}: result {n}") for n, (value, one) in ends]
        check_types(f"{where}: the call says", [one.type for one in wholes], results)
        return tuple(wholes) if isinstance(expr.struct_info, relax.TupleStructInfo) else wholes[0]

    def _collective(self, expr: relax.Call, name: str) -> Tree:
        """What a collective of a manual computation gives."""
        where = f"{self._function}.{name}"
        comm = comm_in(self._region, expr, self._reader.mesh, where)
        devices = self._reader.devices(self._function, name, self._scopes)
        if comm.kind == "axis_index":
            made = devices.index(comm.axes)
        else:
            (value,) = [
                leaf for arg in expr.args[:] if tensor_infos(arg.struct_info) for leaf in self._values(arg, name)
            ]
            made = devices.run(comm, value, where)
        check_types(f"{where}: the call says", [made.type], tensor_types(expr.struct_info, where))
        return made

    def _values(self, arg: relax.Expr, name: str) -> list[Value]:
        return leaves(self._expression(arg, name))


def _types(params: Sequence[relax.Var], where: str) -> list[TensorType]:
    return [one for param in params for one in tensor_types(param.struct_info, where)]
