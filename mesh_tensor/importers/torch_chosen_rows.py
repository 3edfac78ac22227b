"""Rows that a mask chooses, as many as data says: `x[mask]`, and `x[rows]` of `torch.where(mask)` or `mask.nonzero()`.

All rows are computed instead, each where it stands, as long as operators give each row from one row; where they are
put back, added up or averaged, those that the mask leaves out are dropped. Experts that are given the tokens that chose
them so are imported, and run on all of them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate

from .torch_decompositions import DecomposedProgram
from .torch_known_rows import is_of_mask, known_rows
from .torch_program import ASSERTIONS, depends_on_data
from .torch_put_rows import without_rows
from .torch_reduced_rows import running
from .torch_row_by_row import is_smooth, keeps_rows
from .torch_row_numbers import with_number
from .torch_rows_graph import Along, Mask, OtherError, RowsGraph, args_of, is_open, rows_of, same, symbol_of, tensors_of
from .torch_rows_of_rows import beside, chosen_again, is_beside, is_chosen_again

_aten = torch.ops.aten
_SIZED = {
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default),
    *(_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.empty.memory_format),
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
}
# Operands that say which elements of another operand are looked up.
_INDICES: dict[Any, int] = {
    _aten.embedding.default: 1,
    _aten.gather.default: 2,
    _aten.index_select.default: 2,
    _aten.one_hot.default: 0,
}
_PARTS = (_aten.slice.Tensor, _aten.select.int)
_SQUEEZES = (_aten.squeeze.dims, _aten.squeeze.dim)


def _has_rows(node: torch.fx.Node) -> bool:
    return any(rows_of(each) is not None for each in (node, *node.all_input_nodes))


def with_all_rows(program: Any) -> Any:
    """The program, taken apart into operators, with all rows of those that masks choose; the program itself where
    there are none, or something else than the above is done with them."""
    if not any(depends_on_data(n) or is_of_mask(n) for n in program.graph.nodes if n.op == "call_function"):
        return program
    try:
        return _AllRows(program).made()
    except OtherError:
        return program


class _AllRows:
    def __init__(self, program: Any) -> None:
        values = (node.meta.get("val") for node in program.graph.nodes)
        fake = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
        self._program, self._to = program, RowsGraph(fake)
        self._place = self._to.place
        self._masks = self._to.masks
        self._several: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}  # results, of old nodes that have several
        self._together: set[torch.fx.Node] = set()  # old nodes without rows that are made of rows, or of their number
        self._nowhere: set[torch.fx.Node] = set()  # old nodes that are False, whatever data says
        self._to.is_smooth = all(is_smooth(node) for node in program.graph.nodes if _has_rows(node))

    def made(self) -> DecomposedProgram:
        """The program in which all rows are computed."""
        for node in self._program.graph.nodes:
            if node.op == "call_function" and node.target not in ASSERTIONS:
                self._call(node)
            elif node.op != "call_function":
                if any(rows_of(operand) is not None for operand in node.all_input_nodes):
                    raise OtherError
                self._place[node] = self._copied(node)
        self._to.graph.eliminate_dead_code()
        graph = torch.fx.GraphModule(self._program.graph_module, self._to.graph)
        chosen = [mask.count for mask in set(self._masks.values()) if not isinstance(mask.of, tuple)]
        return DecomposedProgram(self._program, graph, chosen)

    def _copied(self, node: torch.fx.Node) -> torch.fx.Node:
        if any(operand not in self._place for operand in node.all_input_nodes):
            raise OtherError
        made = self._to.graph.node_copy(node, lambda old: self._place[old])
        if node.op == "placeholder":
            made.name = node.name  # as the signature has it
        return made

    def _call(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)) and free_unbacked_symbols(value):
            return  # what takes it, knows it
        along = {operand: dim for operand in node.all_input_nodes if (dim := rows_of(operand)) is not None}
        number = None
        if node.target is operator.getitem and args_of(node)[0] in self._several:
            made = self._several[args_of(node)[0]][args_of(node)[1]]
        elif (number := with_number(node, self._again, self._to)) is not None:
            made = number
        elif along:
            made = self._of_rows(node, along)
        elif is_of_mask(node):
            made = known_rows(node, self._to)
        elif not depends_on_data(node):
            made = self._copied(node)
        elif node.target in _CHOOSING:
            made = _CHOOSING[node.target](self, node)
        elif node.target in _SIZED:
            made = self._again(node, args_of(node))
        else:
            raise OtherError
        if rows_of(node) is None and (along or number is not None or self._together.intersection(node.all_input_nodes)):
            self._together.add(node)
        if isinstance(made, tuple):
            self._several[node] = made
        else:
            self._place[node] = made
        made = [one for each in (made if isinstance(made, tuple) else [made]) for one in tensors_of(each)]
        if not all(self._fits(*pair) for pair in zip(made, tensors_of(node), strict=True)):
            raise OtherError

    def _fits(self, made: torch.Tensor, meant: torch.Tensor) -> bool:
        """Whether a value is what was meant, of all rows."""
        sizes = [self._masks[symbol_of(n)].count if symbol_of(n) in self._masks else n for n in meant.shape]
        return made.dtype == meant.dtype and [*made.shape] == sizes

    # What chooses rows.

    def _mask(self, node: torch.fx.Node, size: Any) -> Mask:
        """The mask that chooses `size` rows."""
        shape = tuple(node.meta["val"].shape)
        known = self._masks.get(symbol_of(size))
        if known is not None and not same(known.of, node):
            raise OtherError
        if not all(isinstance(n, int) for n in shape) or not shape:
            raise OtherError
        if known is None:
            known = next((mask for mask in self._masks.values() if same(mask.of, node)), None)
        if known is None:
            mask = self._place[node]
            if node.meta["val"].dtype != torch.bool:
                mask = self._to.emit(_aten.ne.Scalar, mask, 0)
            known = Mask(mask, node, shape)
        self._masks[symbol_of(size)] = known
        return known

    def _places(self, node: torch.fx.Node) -> torch.fx.Node:
        """Where rows stand: (rows, dims of the mask)."""
        mask = self._mask(args_of(node)[0], node.meta["val"].shape[0])
        number = self._to.emit(_aten.arange.default, mask.count)
        columns = []
        for dim, size in enumerate(mask.shape):
            within = math.prod(mask.shape[dim + 1 :])
            column = number
            if within > 1:
                column = self._to.emit(_aten.div.Tensor_mode, number, within, rounding_mode="floor")
            columns.append(self._to.emit(_aten.remainder.Scalar, column, size) if dim else column)
        return self._to.substituted(self._to.emit(_aten.stack.default, columns, -1), 0, mask)

    def _at_mask(self, node: torch.fx.Node) -> torch.fx.Node:
        """`x[mask]`, of leading dims or of those after some that are taken whole."""
        x, indices = args_of(node)
        first = next(n for n, index in enumerate(indices) if index is not None)
        if len(indices) != first + 1 or indices[first].meta["val"].dtype != torch.bool:
            raise OtherError
        mask = self._mask(indices[first], node.meta["val"].shape[first])
        shape = x.meta["val"].shape
        rows = self._to.reshaped(self._place[x], (*shape[:first], mask.count, *shape[first + len(mask.shape) :]))
        return self._to.substituted(rows, first, mask)

    def _elements(self, node: torch.fx.Node) -> torch.fx.Node:
        """`x.masked_select(mask)`, of a mask that is as large as x, or larger."""
        x, of = args_of(node)
        mask = self._mask(of, node.meta["val"].shape[0])
        if torch.broadcast_shapes(x.meta["val"].shape, mask.shape) != mask.shape:
            raise OtherError
        rows = self._to.emit(_aten.expand.default, self._place[x], [*mask.shape])
        return self._to.substituted(self._to.reshaped(rows, (mask.count,)), 0, mask)

    # What is done with them.

    def _of_rows(self, node: torch.fx.Node, along: Along) -> Any:
        masks = {operand: self._to.mask_of(tensors_of(operand)[0].shape[dim]) for operand, dim in along.items()}
        result = rows_of(node)
        if is_beside(node, result):
            beside(node, masks, self._to)
            return self._again(node, args_of(node))
        if is_chosen_again(node, along):
            return chosen_again(node, masks, self._to)
        if len(set(masks.values())) != 1:
            raise OtherError
        mask = next(iter(masks.values()))
        if result is None:
            return without_rows(node, along, mask, self._to)
        if (place := self._where_rows_stand(node)) is not None:
            return place
        if node.target is _aten.index.Tensor:
            return self._looked_up(node, along, mask, result)
        if node.target in _INDICES:
            return self._to.substituted(self._by_indices(node, along, mask), result, mask)
        if set(along) == {args_of(node)[0]} and (made := running(node, result, mask, self._to)) is not None:
            return made
        if not keeps_rows(node, along, result):
            raise OtherError
        together = {each: self._to.if_some(self._place[each], mask) for each in self._beside(node)}
        return self._again(node, torch.fx.map_arg(args_of(node), lambda each: together.get(each, each)))

    def _beside(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The operands without rows that are made of rows."""
        return [each for each in node.all_input_nodes if each in self._together and each in self._place]

    def _where_rows_stand(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """If the node is where rows stand along one of the mask's dims, that, which is noted; None if not."""
        first = next(iter(args_of(node)), None)
        value = node.meta["val"]
        if not isinstance(first, torch.fx.Node) or not isinstance(value, torch.Tensor):
            return None
        if is_open(math.prod(value.shape[1:])) or math.prod(value.shape[1:]) != 1:
            return None
        dims = self._to.dims
        if node.target in _PARTS and first.target is _aten.nonzero.default and args_of(node)[1] == 1:
            dims[node] = args_of(node)[2] % first.meta["val"].shape[1]
        elif node.target in _SQUEEZES and (first in dims or first.target is _aten.nonzero.default):
            dims[node] = dims.get(first, 0)
        elif node.target is _aten.lt.Scalar and first in dims and args_of(node)[1] == 0:
            self._nowhere.add(node)
        elif node.target is _aten.where.self and first in self._nowhere and args_of(node)[2] in dims:
            dims[node] = dims[args_of(node)[2]]
            return self._place[args_of(node)[2]]
        return self._again(node, args_of(node)) if node in dims else None

    def _looked_up(self, node: torch.fx.Node, along: Along, mask: Mask, rows: int) -> torch.fx.Node:
        """`x[rows]`: where these are along dims of the mask that are x's, all of x, once for each row of the others."""
        x, indices = args_of(node)
        if x in along:
            raise OtherError
        dims: list[Any] = [self._to.dims.get(index) for index in indices]
        shape = tuple(x.meta["val"].shape)
        flat = all(index is not None and index.meta["val"].dim() == 1 for index in indices)
        known = flat and len(dims) == len(set(dims)) and None not in dims
        if known and shape[: len(dims)] == tuple(mask.shape[dim] for dim in dims):
            return self._to.substituted(self._spread(self._place[x], dims, mask), 0, mask)
        safe = [index if index is None else self._to.index(index, along, mask) for index in indices]
        return self._to.substituted(self._to.emit(_aten.index.Tensor, self._place[x], safe), rows, mask)

    def _spread(self, x: torch.fx.Node, dims: list[Any], mask: Mask) -> torch.fx.Node:
        """x, whose first dims are these of the mask: for each of the mask's elements, in their order."""
        rest = tuple(x.meta["val"].shape[len(dims) :])
        order = sorted(range(len(dims)), key=lambda position: dims[position])
        x = self._to.permuted(x, [*order, *range(len(dims), len(dims) + len(rest))])
        ones = [size if dim in dims else 1 for dim, size in enumerate(mask.shape)]
        x = self._to.emit(_aten.expand.default, self._to.reshaped(x, (*ones, *rest)), [*mask.shape, *rest])
        return self._to.reshaped(x, (mask.count, *rest))

    def _by_indices(self, node: torch.fx.Node, along: Along, mask: Mask) -> torch.fx.Node:
        """What is looked up by indices of rows."""
        position = _INDICES[node.target]
        index = args_of(node)[position]
        if node.target is _aten.gather.default:
            x, dim = args_of(node)[:2]
            known = index in along and along.get(x) == along[index] != dim % x.meta["val"].dim()
        else:
            known = set(along) == {index}
        if not known:
            raise OtherError
        safe = self._to.index(index, along, mask)
        return self._again(node, [safe if number == position else arg for number, arg in enumerate(args_of(node))])

    def _again(self, node: torch.fx.Node, args: Any) -> torch.fx.Node:
        """The node, of all rows."""

        def meant(arg: Any) -> Any:
            if not isinstance(arg, torch.fx.Node) or arg.graph is self._to.graph:
                return arg
            value = arg.meta.get("val")
            if isinstance(value, torch.SymInt) and is_open(value):
                if node.target not in _SIZED or (mask := self._masks.get(symbol_of(value))) is None:
                    raise OtherError
                return mask.count
            if arg not in self._place:
                raise OtherError
            return self._place[arg]

        if any(isinstance(arg, torch.fx.Node) and is_open(arg.meta.get("val")) for arg in args):
            raise OtherError  # a number that fills, not a size
        kwargs: Any = map_aggregate(node.kwargs, meant)
        made = self._to.emit(node.target, *map_aggregate(tuple(args), meant), **kwargs)
        made.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        return made


_CHOOSING = {
    _aten.nonzero.default: _AllRows._places,
    _aten.index.Tensor: _AllRows._at_mask,
    _aten.masked_select.default: _AllRows._elements,
}
