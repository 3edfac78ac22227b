"""ONNX's LSTM in smaller operators: a step of each position after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mesh_tensor.base.errors import refuse

_MOST_STEPS = 4096
_USUAL = ("Sigmoid", "Tanh", "Tanh")


def lstm_nodes(onnx: Any, node: Any, shape: Sequence[int | str] | None) -> list[Any]:
    """The nodes that an LSTM is made of. `shape`: that of what it takes, (positions, batch, features).

    Raises:
        MeshTensorError: the number of positions is open, or an option that is not known here; all are named.
    """
    options = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    direction = options.get("direction", b"forward").decode()
    names = [*node.input, *[""] * (8 - len(node.input))]
    both = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    problems = []
    if shape is None or not isinstance(shape[0], int) or shape[0] > _MOST_STEPS:
        problems.append(f"the number of positions is {'unknown' if shape is None else shape[0]}")
    activations = [text.decode() for text in options.get("activations", ())]
    if activations and activations != [*_USUAL] * len(both):
        problems.append(f"its activations are {activations}")
    if "hidden_size" not in options:
        problems.append("it does not say its hidden_size")
    problems += [f"it has the option {name!r}" for name in ("clip", "input_forget", "layout") if options.get(name)]
    problems += [f"it has {what}" for at, what in ((4, "lengths of sequences"), (7, "peepholes")) if names[at]]
    if problems:
        refuse(
            problems,
            where=f"node {node.name or node.output[0]!r} (LSTM)",
            fix="export it for sequences of one known length, without these; settle open sizes by `shapes`",
        )
    assert shape is not None
    assert isinstance(shape[0], int)
    maker = _Maker(onnx, next(name for name in node.output if name), int(options["hidden_size"]))
    made = [maker.direction(names, number, way, shape[0]) for number, way in enumerate(both)]
    outputs = [*node.output, *[""] * (3 - len(node.output))]
    for name, parts, axis in zip(outputs, zip(*made, strict=True), (1, 0, 0), strict=True):
        if name:
            maker.emit("Concat", list(parts), name, axis=axis)
    return maker.nodes


class _Maker:
    """Nodes in the making, which all opsets have; what they give has names that begin with `prefix`."""

    def __init__(self, onnx: Any, prefix: str, hidden: int) -> None:
        self.nodes: list[Any] = []
        self._hidden, self._onnx, self._prefix, self._numbers = hidden, onnx, prefix, dict[tuple[int, ...], str]()
        self._count = itertools.count()

    def emit(self, op: str, inputs: list[str], name: str = "", **options: Any) -> str:
        """The name of what an operator with one result gives."""
        name = name or self._new()
        self.nodes.append(self._onnx.helper.make_node(op, inputs, [name], **options))
        return name

    def direction(self, names: list[str], number: int, way: str, count: int) -> tuple[str, str, str]:
        """The states of all positions (positions, 1, batch, hidden), the last one, and the last cell's, (1, batch,
        hidden), of one direction. `names` are those of the LSTM's operands."""
        x, w, r, bias, _, first, first_cell, _ = names
        weight, again = (self._turned(name, number) for name in (w, r))
        given = self.emit("MatMul", [x, weight])
        if bias:
            for part in self._split(self._of(bias, number), 2, 4 * self._hidden):
                given = self.emit("Add", [given, part])
        state = self._of(first, number) if first else ""
        cell = self._of(first_cell, number) if first_cell else ""
        states: dict[int, str] = {}
        for position in range(count) if way == "forward" else reversed(range(count)):
            state, cell = self._step(self._of(given, position), state, cell, again)
            states[position] = self._reshaped(state, (1, 1, -1, self._hidden))
        every = self.emit("Concat", [states[position] for position in range(count)], axis=0)
        last, last_cell = (self._reshaped(part, (1, -1, self._hidden)) for part in (state, cell))
        return every, last, last_cell

    def _step(self, gates: str, state: str, cell: str, again: str) -> tuple[str, str]:
        """The next state and cell; those that are "" are 0."""
        if state:
            gates = self.emit("Add", [gates, self.emit("MatMul", [state, again])])
        enter, leave, keep, new = self._split(gates, 4, self._hidden)
        enter, leave, keep = (self.emit("Sigmoid", [gate]) for gate in (enter, leave, keep))
        made = self.emit("Mul", [enter, self.emit("Tanh", [new])])
        if cell:
            made = self.emit("Add", [self.emit("Mul", [keep, cell]), made])
        return self.emit("Mul", [leave, self.emit("Tanh", [made])]), made

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
        return f"{self._prefix}_lstm_{next(self._count)}"
