"""What is known of an ONNX graph, and nodes in the making."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mesh_tensor.base.errors import refuse

from .onnx_sizes import Sizes


@dataclass(frozen=True)
class Facts:
    """What is known of a graph's values: the numbers of constants; the element types and sizes."""

    opset: int
    constants: Mapping[str, np.ndarray]
    types: Mapping[str, tuple[int, Sizes]]
    used: frozenset[str] = frozenset()  # values that something takes, or that are results

    def dtype(self, onnx: Any, name: str) -> np.dtype:
        """The dtype of a value; float32 where nothing tells."""
        kind = self.types.get(name, (onnx.TensorProto.FLOAT, []))[0]
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind or onnx.TensorProto.FLOAT))

    def sizes(self, name: str) -> Sizes | None:
        """The sizes of a value, if their number is known."""
        return self.types[name][1] if name in self.types else None


class Nodes:
    """Nodes in the making; what they give has names that begin with that of the operator's first result."""

    def __init__(self, onnx: Any, node: Any, facts: Facts) -> None:
        self.onnx, self.node, self.facts = onnx, node, facts
        self.options = {option.name: onnx.helper.get_attribute_value(option) for option in node.attribute}
        self.made: list[Any] = []
        self._prefix = next((name for name in node.output if name), "none")
        self._count = itertools.count()
        self._constants: dict[tuple[Any, ...], str] = {}

    def operand(self, number: int) -> str:
        """The operand's name; "" where there is none."""
        return self.node.input[number] if number < len(self.node.input) else ""

    def known(self, number: int) -> np.ndarray | None:
        """The operand's numbers, if it is a constant."""
        return self.facts.constants.get(self.operand(number))

    def emit(self, op: str, inputs: Sequence[str], name: str = "", **options: Any) -> str:
        """The name of what an operator with one result gives."""
        name = name or f"{self._prefix}_{op.lower()}_{next(self._count)}"
        self.made.append(self.onnx.helper.make_node(op, list(inputs), [name], **options))
        return name

    def reduced(self, op: str, name: str, axes: Sequence[int]) -> str:
        """The name of a reduction over dims, which stay."""
        since = 13 if op == "ReduceSum" else 18  # axes are operands since then
        if self.facts.opset < since:
            return self.emit(op, [name], axes=list(axes))
        return self.emit(op, [name, self.constant(axes)])

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """The name of a constant; of equal ones, of the first."""
        value = np.asarray(values, dtype)
        key = value.dtype, value.shape, value.tobytes()
        if key not in self._constants:
            name = self._constants[key] = f"{self._prefix}_constant_{next(self._count)}"
            tensor = self.onnx.numpy_helper.from_array(value, name)
            self.made.append(self.onnx.helper.make_node("Constant", [], [name], value=tensor))
        return self._constants[key]

    def refuse(self, what: str | Sequence[str], fix: str) -> NoReturn:
        """Refuse the operator."""
        refuse(what, where=f"node {self.node.name or self._prefix!r} ({self.node.op_type})", fix=fix)
