"""ONNX's LSTM, GRU and RNN in smaller operators: a step of each position after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .onnx_nodes import Facts, Nodes

_MOST_STEPS = 4096
_INT64, _BOOL = 7, 9  # onnx.TensorProto's
# The position of what is the same for all of them among the operands.
_LENGTHS, _FIRST, _FIRST_CELL, _PEEPHOLES = 4, 5, 6, 7


@dataclass(frozen=True)
class _Cell:
    """A recurrent operator: how many gates its weights are made of, how many states it hands on, and what its
    activations are, unless it says others."""

    gates: int
    states: int
    usual: tuple[str, ...]


CELLS = {
    "LSTM": _Cell(4, 2, ("Sigmoid", "Tanh", "Tanh")),
    "GRU": _Cell(3, 1, ("Sigmoid", "Tanh")),
    "RNN": _Cell(1, 1, ("Tanh",)),
}
# Operators by themselves; those of the second line have numbers of their own, which are the operators' usual ones here.
_PLAIN = frozenset({"Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"})
_WITH_NUMBERS = frozenset({"Elu", "HardSigmoid", "LeakyRelu", "ThresholdedRelu"})


def recurrent_nodes(onnx: Any, node: Any, facts: Facts) -> list[Any]:
    """The nodes that an LSTM, GRU or RNN is made of.

    Raises:
        MeshTensorError: the number of positions is open, or an option that is not known here; all are named.
    """
    maker, shape = _Maker(onnx, node, facts), facts.sizes(node.input[0])  # (positions, batch, features)
    options = maker.options
    direction = options.get("direction", b"forward").decode()
    names = [*node.input, *[""] * (8 - len(node.input))]
    both = ("forward", "reverse") if direction == "bidirectional" else (direction,)
    each = CELLS[node.op_type].usual
    activations = tuple([text.decode() for text in options.get("activations", ())]) or each * len(both)
    problems = []
    if shape is None or not isinstance(shape[0], int) or shape[0] > _MOST_STEPS:
        problems.append(f"the number of positions is {'unknown' if shape is None else shape[0]}")
    scaled = any(options.get(f"activation_{name}") for name in ("alpha", "beta"))
    known = _PLAIN if scaled else _PLAIN | _WITH_NUMBERS
    if len(activations) != len(each) * len(both) or not known.issuperset(activations):
        problems.append(f"its activations are {[*activations]}{', with numbers' * scaled}")
    if "hidden_size" not in options:
        problems.append("it does not say its hidden_size")
    problems += [f"it has the option {name!r}" for name in ("clip", "layout") if options.get(name)]
    if problems:
        maker.refuse(
            problems, "export it for sequences of one known length, without these; settle open sizes by `shapes`"
        )
    assert shape is not None
    assert isinstance(shape[0], int)
    parts = [activations[at : at + len(each)] for at in range(0, len(activations), len(each))]
    made = [maker.direction(names, number, way, shape[0], parts[number]) for number, way in enumerate(both)]
    for name, of_both, axis in zip(node.output, zip(*made, strict=True), (1, 0, 0), strict=False):
        if name:
            maker.emit("Concat", list(of_both), name, axis=axis)
    return maker.made


@dataclass(frozen=True)
class _Again:
    """What the state is multiplied with, and what is added then, if that is not added before; what gates see of the
    cell; and the activations."""

    weight: str
    bias: str
    peepholes: list[str]
    activations: Sequence[str]


class _Maker(Nodes):
    """Nodes in the making, which all opsets have."""

    def __init__(self, onnx: Any, node: Any, facts: Facts) -> None:
        super().__init__(onnx, node, facts)
        self._cell, self._hidden = CELLS[node.op_type], int(self.options.get("hidden_size", 0))
        self._inner = bool(self.options.get("linear_before_reset", 0))  # a GRU resets the product with the state
        self._couples = bool(self.options.get("input_forget", 0))  # an LSTM keeps what it does not replace

    def direction(
        self, names: list[str], number: int, way: str, count: int, activations: Sequence[str]
    ) -> tuple[str, ...]:
        """The states of all positions (positions, 1, batch, hidden), and the last ones, (1, batch, hidden), of one
        direction. `names` are those of the operator's operands."""
        x, w, r, bias = names[:4]
        made, inner = {}, ""
        given = self.emit("MatMul", [x, self._turned(w, number)])
        if bias:
            first, second = self._split(self._of(bias, number), 2, self._cell.gates * self._hidden)
            given, inner = self.emit("Add", [given, first]), second if self._inner else ""
            given = given if self._inner else self.emit("Add", [given, second])
        of_cell = self._split(self._of(names[_PEEPHOLES], number), 3, self._hidden) if names[_PEEPHOLES] else []
        again = _Again(self._turned(r, number), inner, of_cell, activations)
        firsts = (names[_FIRST], names[_FIRST_CELL])[: self._cell.states]
        states = [self._of(name, number) if name else "" for name in firsts]
        step = _STEPS[self.node.op_type]
        for position in range(count) if way == "forward" else reversed(range(count)):
            new = step(self, self._of(given, position), states, again)
            result, states = self._within(position, names[_LENGTHS], new, states)
            made[position] = self._reshaped(result, (1, 1, -1, self._hidden))
        every = self.emit("Concat", [made[position] for position in range(count)], axis=0)
        return every, *[self._reshaped(part, (1, -1, self._hidden)) for part in states]

    def _within(self, position: int, lengths: str, new: list[str], states: list[str]) -> tuple[str, list[str]]:
        """The result and the states at a position: 0 and as before for sequences that don't reach so far."""
        if not lengths:
            return new[0], new
        column = self._reshaped(self.emit("Cast", [lengths], to=_INT64), (-1, 1))
        is_there = self.emit("Less", [self.constant((position,)), column])
        is_there = self.emit("Cast", [is_there], to=_BOOL)  # of two constants, TVM's importer makes no bool
        kept = [
            self.emit("Where", [is_there, *both]) for both in zip(new, [s or self._zero() for s in states], strict=True)
        ]
        return self.emit("Where", [is_there, new[0], self._zero()]), kept

    def lstm(self, gates: str, states: list[str], again: _Again) -> list[str]:
        """The next state and cell; those that are "" are 0."""
        state, cell = states
        gate, of_new, of_cell = again.activations
        if state:
            gates = self.emit("Add", [gates, self.emit("MatMul", [state, again.weight])])
        enter, leave, keep, new = self._split(gates, 4, self._hidden)
        if again.peepholes and cell:
            enter, keep = (
                self.emit("Add", [of, self.emit("Mul", [cell, again.peepholes[number]])])
                for of, number in ((enter, 0), (keep, 2))
            )
        enter = self.emit(gate, [enter])
        made = self.emit("Mul", [enter, self.emit(of_new, [new])])
        if cell:
            rest = (
                self.emit("Mul", [enter, cell]) if self._couples else self.emit("Mul", [self.emit(gate, [keep]), cell])
            )
            before = self.emit("Sub", [cell, rest]) if self._couples else rest
            made = self.emit("Add", [before, made])
        if again.peepholes:
            leave = self.emit("Add", [leave, self.emit("Mul", [made, again.peepholes[1]])])
        return [self.emit("Mul", [self.emit(gate, [leave]), self.emit(of_cell, [made])]), made]

    def gru(self, gates: str, states: list[str], again: _Again) -> list[str]:
        """The next state; one that is "" is 0."""
        (state,) = states
        gate, of_new = again.activations
        parts = self._split(gates, 3, self._hidden)
        weights = self._split(again.weight, 3, self._hidden)
        biases = self._split(again.bias, 3, self._hidden) if again.bias else [""] * 3
        keep, reset = (
            self.emit(gate, [self._with(*of)]) for of in zip(parts, biases, [state] * 2, weights, strict=False)
        )
        new, weight, bias = parts[2], weights[2], biases[2]
        if self._inner:
            carried = self._with("", bias, state, weight)
            new = self.emit("Add", [new, self.emit("Mul", [reset, carried])]) if carried else new
        else:
            new = self._with(new, bias, self.emit("Mul", [reset, state]) if state else "", weight)
        new = self.emit(of_new, [new])
        made = self.emit("Sub", [new, self.emit("Mul", [keep, new])])
        return [self.emit("Add", [made, self.emit("Mul", [keep, state])]) if state else made]

    def rnn(self, gates: str, states: list[str], again: _Again) -> list[str]:
        """The next state; one that is "" is 0."""
        return [self.emit(again.activations[0], [self._with(gates, again.bias, states[0], again.weight)])]

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
        return self.emit("Gather", [name, self.constant(number)], axis=0)

    def _reshaped(self, name: str, shape: tuple[int, ...]) -> str:
        return self.emit("Reshape", [name, self.constant(shape)])

    def _split(self, name: str, parts: int, size: int) -> list[str]:
        bounds = [(self.constant((start,)), self.constant((start + size,))) for start in range(0, parts * size, size)]
        return [self.emit("Slice", [name, start, end, self.constant((-1,))]) for start, end in bounds]

    def _zero(self) -> str:
        return self.constant(0, self.facts.dtype(self.onnx, self.operand(0)))


_STEPS: dict[str, Callable[[_Maker, str, list[str], _Again], list[str]]] = {
    "LSTM": _Maker.lstm,
    "GRU": _Maker.gru,
    "RNN": _Maker.rnn,
}
