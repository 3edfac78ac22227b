"""ONNX's LSTM, GRU and RNN in smaller operators: a step of each position after the other; and sizes in an ONNX model:
refused before anything is made of them, where no tensor has them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from mesh_tensor.base.errors import refuse

from .imported import identifiers

_MOST_STEPS = 4096
# The position of what is the same for all of them among the operands.
_LENGTHS, _FIRST, _FIRST_CELL, _PEEPHOLES = 4, 5, 6, 7


@dataclass(frozen=True)
class _Cell:
    """A recurrent operator: how many gates its weights are made of, how many states it hands on, and what its
    activations are. `others`: whether each direction may have another one of these instead of its only one."""

    gates: int
    states: int
    usual: tuple[str, ...]
    others: tuple[str, ...] = ()


CELLS = {
    "LSTM": _Cell(4, 2, ("Sigmoid", "Tanh", "Tanh")),
    "GRU": _Cell(3, 1, ("Sigmoid", "Tanh")),
    "RNN": _Cell(1, 1, ("Tanh",), ("Tanh", "Relu", "Sigmoid")),
}


def recurrent_nodes(onnx: Any, node: Any, shape: Sequence[int | str] | None) -> list[Any]:
    """The nodes that an LSTM, GRU or RNN is made of. `shape`: that of what it takes, (positions, batch, features).

    Raises:
        MeshTensorError: the number of positions is open, or an option that is not known here; all are named.
    """
    cell = CELLS[node.op_type]
    options = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    direction = options.get("direction", b"forward").decode()
    names = [*node.input, *[""] * (8 - len(node.input))]
    both = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    problems = []
    if shape is None or not isinstance(shape[0], int) or shape[0] > _MOST_STEPS:
        problems.append(f"the number of positions is {'unknown' if shape is None else shape[0]}")
    activations = [text.decode() for text in options.get("activations", ())] or [*cell.usual] * len(both)
    known = len(activations) == len(both) and set(activations) <= {*cell.others}
    if activations != [*cell.usual] * len(both) and not known:
        problems.append(f"its activations are {activations}")
    if "hidden_size" not in options:
        problems.append("it does not say its hidden_size")
    problems += [f"it has the option {name!r}" for name in ("clip", "input_forget", "layout") if options.get(name)]
    problems += [
        f"it has {what}" for at, what in ((_LENGTHS, "lengths of sequences"), (_PEEPHOLES, "peepholes")) if names[at]
    ]
    if problems:
        refuse(
            problems,
            where=f"node {node.name or node.output[0]!r} ({node.op_type})",
            fix="export it for sequences of one known length, without these; settle open sizes by `shapes`",
        )
    assert shape is not None
    assert isinstance(shape[0], int)
    inner = bool(options.get("linear_before_reset", 0))
    maker = _Maker(onnx, next(name for name in node.output if name), int(options["hidden_size"]), node.op_type, inner)
    made = [maker.direction(names, number, way, shape[0], activations) for number, way in enumerate(both)]
    for name, parts, axis in zip(node.output, zip(*made, strict=True), (1, 0, 0), strict=False):
        if name:
            maker.emit("Concat", list(parts), name, axis=axis)
    return maker.nodes


@dataclass(frozen=True)
class _Again:
    """What the state is multiplied with, and what is added then, if that is not added before."""

    weight: str
    bias: str = ""


class _Maker:
    """Nodes in the making, which all opsets have; what they give has names that begin with `prefix`. `inner`: a GRU
    resets the product with the state instead of the state."""

    def __init__(self, onnx: Any, prefix: str, hidden: int, kind: str, inner: bool) -> None:
        self._kind, self._cell, self._inner = kind, CELLS[kind], inner
        self.nodes: list[Any] = []
        self._hidden, self._onnx, self._prefix, self._numbers = hidden, onnx, prefix, dict[tuple[int, ...], str]()
        self._count = itertools.count()

    def emit(self, op: str, inputs: list[str], name: str = "", **options: Any) -> str:
        """The name of what an operator with one result gives."""
        name = name or self._new()
        self.nodes.append(self._onnx.helper.make_node(op, inputs, [name], **options))
        return name

    def direction(
        self, names: list[str], number: int, way: str, count: int, activations: Sequence[str]
    ) -> tuple[str, ...]:
        """The states of all positions (positions, 1, batch, hidden), and the last ones, (1, batch, hidden), of one
        direction. `names` are those of the operator's operands."""
        x, w, r, bias = names[:4]
        gates, made = self._cell.gates * self._hidden, {}
        given = self.emit("MatMul", [x, self._turned(w, number)])
        again = _Again(self._turned(r, number))
        if bias:
            first, second = self._split(self._of(bias, number), 2, gates)
            given = self.emit("Add", [given, first])
            if self._inner:
                again = _Again(again.weight, second)
            else:
                given = self.emit("Add", [given, second])
        firsts = (names[_FIRST], names[_FIRST_CELL])[: self._cell.states]
        states = [self._of(name, number) if name else "" for name in firsts]
        step = _STEPS[self._kind]
        for position in range(count) if way == "forward" else reversed(range(count)):
            states = step(self, self._of(given, position), states, again, activations[number % len(activations)])
            made[position] = self._reshaped(states[0], (1, 1, -1, self._hidden))
        every = self.emit("Concat", [made[position] for position in range(count)], axis=0)
        return every, *[self._reshaped(part, (1, -1, self._hidden)) for part in states]

    def lstm(self, gates: str, states: list[str], again: _Again, _: str) -> list[str]:
        """The next state and cell; those that are "" are 0."""
        state, cell = states
        if state:
            gates = self.emit("Add", [gates, self.emit("MatMul", [state, again.weight])])
        enter, leave, keep, new = self._split(gates, 4, self._hidden)
        enter, leave, keep = (self.emit("Sigmoid", [gate]) for gate in (enter, leave, keep))
        made = self.emit("Mul", [enter, self.emit("Tanh", [new])])
        if cell:
            made = self.emit("Add", [self.emit("Mul", [keep, cell]), made])
        return [self.emit("Mul", [leave, self.emit("Tanh", [made])]), made]

    def gru(self, gates: str, states: list[str], again: _Again, _: str) -> list[str]:
        """The next state; one that is "" is 0."""
        (state,) = states
        parts = self._split(gates, 3, self._hidden)
        weights = self._split(again.weight, 3, self._hidden)
        biases = self._split(again.bias, 3, self._hidden) if again.bias else [""] * 3
        keep, reset = (
            self.emit("Sigmoid", [self._with(*of)]) for of in zip(parts, biases, [state] * 2, weights, strict=False)
        )
        new, weight, bias = parts[2], weights[2], biases[2]
        if self._inner:
            carried = self._with("", bias, state, weight)
            new = self.emit("Add", [new, self.emit("Mul", [reset, carried])]) if carried else new
        else:
            new = self._with(new, bias, self.emit("Mul", [reset, state]) if state else "", weight)
        new = self.emit("Tanh", [new])
        made = self.emit("Sub", [new, self.emit("Mul", [keep, new])])
        return [self.emit("Add", [made, self.emit("Mul", [keep, state])]) if state else made]

    def rnn(self, gates: str, states: list[str], again: _Again, activation: str) -> list[str]:
        """The next state; one that is "" is 0."""
        return [self.emit(activation, [self._with(gates, again.bias, states[0], again.weight)])]

    def _with(self, made: str, bias: str, state: str, weight: str) -> str:
        """The sum of what was made, a bias and a product of a state, as far as they are there."""
        product = self.emit("MatMul", [state, weight]) if state else ""
        first, *rest = [name for name in (made, bias, product) if name] or [""]
        for name in rest:
            first = self.emit("Add", [first, name])
        return first

    def _turned(self, name: str, number: int) -> str:
        return self.emit("Transpose", [self._of(name, number)], perm=[1, 0])

    def _of(self, name: str, number: int) -> str:
        """The slice of that number along dim 0."""
        return self.emit("Gather", [name, self._constant(number)], axis=0)

    def _reshaped(self, name: str, shape: tuple[int, ...]) -> str:
        return self.emit("Reshape", [name, self._constant(shape)])

    def _split(self, name: str, parts: int, size: int) -> list[str]:
        """Parts of that size along the last dim."""
        bounds = [(self._constant((start,)), self._constant((start + size,))) for start in range(0, parts * size, size)]
        return [self.emit("Slice", [name, start, end, self._constant((-1,))]) for start, end in bounds]

    def _constant(self, value: int | tuple[int, ...]) -> str:
        dims, values = ([], (value,)) if isinstance(value, int) else ([len(value)], value)
        key = (len(dims), *values)
        if key not in self._numbers:
            tensor = self._onnx.helper.make_tensor(self._prefix, self._onnx.TensorProto.INT64, dims, values)
            self._numbers[key] = self._new()
            self.nodes.append(self._onnx.helper.make_node("Constant", [], [self._numbers[key]], value=tensor))
        return self._numbers[key]

    def _new(self) -> str:
        return f"{self._prefix}_{self._kind.lower()}_{next(self._count)}"


_STEPS: dict[str, Callable[[_Maker, str, list[str], _Again, str], list[str]]] = {
    "LSTM": _Maker.lstm,
    "GRU": _Maker.gru,
    "RNN": _Maker.rnn,
}


_SMALL = 1024  # initializers of more elements than this are sizes of nothing


def check_sizes(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]], path: str) -> None:
    """Refuse sizes below 0, and values that do not fit into memory, as far as ONNX can infer them.

    Args:
        shapes: sizes of inputs that replace the file's.
    """
    problems = [
        f"`shapes` has {str(shape)[:80]} for input {name!r}, which are no sizes"
        for name, shape in shapes.items()
        if not isinstance(shape, Sequence) or not all(map(_is_size, shape))
    ]
    problems += [
        f"input {value.name!r} has size {size} in dim {dim}"
        for value in model.graph.input
        if value.name not in shapes
        for dim, size in enumerate(_sizes(value))
        if size is not None and size < 0
    ]
    if problems:
        refuse(problems, where=path, fix="give the inputs' sizes by `shapes`, or export the model again")
    limit = memory() // 2
    for name, kind, sizes in _values(_inferred(onnx, model, shapes)):
        known = [size for size in sizes if size is not None]
        count = math.prod(known) * _bytes_of(onnx, kind)
        if count > limit or min(known, default=0) < 0:
            what = f"takes {count:,} bytes" if count > limit else f"has a size of {min(known)}"
            refuse(
                f"value {name!r:.80} {what}",
                where=path,
                why=f"its sizes are {sizes}, and half of this machine's memory is {limit:,} bytes",
                fix="check the sizes in the model; open ones are settled by `shapes`",
            )


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def settle_names(graph: Any) -> None:
    """Give open sizes names that are identifiers: TVM reads others as expressions. Equal ones stay equal."""
    dims = [
        dim
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    ]
    names = identifiers(list(dict.fromkeys(dim.dim_param for dim in dims)), [])
    for dim in dims:
        dim.dim_param = names[dim.dim_param]


def _is_size(size: object) -> bool:
    return isinstance(size, Integral) and int(size) >= 0


def _inferred(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """The model's graph without its weights, and with the sizes of all values that ONNX can tell."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph, full = bare.graph, model.graph
    graph.name = full.name or "graph"
    graph.node.extend(full.node)
    graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in full.output)  # what it states may be wrong
    known = {value.name for value in full.input}
    for value in full.input:
        shape = shapes.get(value.name)
        kind = value.type.tensor_type.elem_type
        graph.input.append(value if shape is None else onnx.helper.make_tensor_value_info(value.name, kind, shape))
    for tensor in full.initializer:
        if math.prod(tensor.dims) <= _SMALL:
            graph.initializer.append(tensor)
        elif tensor.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        return onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    except Exception:  # what it can't infer is not known, and found out by those who compute it
        return graph


def _values(graph: Any) -> Iterator[tuple[str, int, list[int | None]]]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name, value.type.tensor_type.elem_type, _sizes(value)


def _sizes(value: Any) -> list[int | None]:
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


def _bytes_of(onnx: Any, kind: int) -> int:
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    except (KeyError, TypeError, ValueError):  # text, or no known type
        return 1
