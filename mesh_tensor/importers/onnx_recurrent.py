"""ONNX's LSTM, GRU and RNN in smaller operators: a step of each position after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tensor.base.errors import refuse

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
