"""What run_sequential found a function to compute for operands of some shapes, as one Python function.

A call is interpreted once, and what it asked of torch is written down. As all sizes are known, the next one asks the
same, unless something looks at data to decide what comes next (R.If, R.assert_op). Transposes that products take along,
or others undo, are left out: they only move elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mesh_tensor.plan.ir import map_tree
from mesh_tensor.program.fuse import linear_call, turns_matrix, undoes
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.targets.straight_line import Line, StraightLine, TileCall
from mesh_tensor.targets.tile_memory import memory_of
from mesh_tensor.targets.torch_ops import makes_new, untyped_function


class Recorder:
    """Writes down what is called while a function of these inputs is interpreted. Tensors are known by the objects that
    they are, so each input has to be one of its own; an object's name is that of the last tensor that was it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._names: dict[int, str] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._lines: list[Line] = []
        self._transposes: dict[str, tuple[OpCall, str]] = {}  # and of what, by what they give
        self._same: dict[str, str] = {}  # of what transposes give that undo others: what those took
        self._new: set[str] = set()  # of what operators give in memory of their own
        self._count, self._is_fixed = 0, True
        self._inputs = tuple([self._named(tensor) for tensor in inputs])

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same at every call."""
        self._constants[self._named(tensor)] = tensor
        return tensor

    def called(
        self,
        call: OpCall,
        function: Callable[..., Any],
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """The function of a call has given these results, in a sequence, for these operands."""
        if not self._is_fixed:
            return
        args = tuple([self._name(tensor) for tensor in operands])
        made = tuple([self._named(tensor) for tensor in results])
        takes = tuple([tuple(tensor.shape) for tensor in operands])
        if call.name == "permute_dims":
            inner = self._transposes.get(args[0])
            if inner is not None and undoes(call, inner[0]):
                self._same[made[0]] = inner[1]
                return
            self._transposes[made[0]] = call, args[0]
        elif call.name == "matmul" and (inner := self._transposes.get(args[1])) and turns_matrix(call, inner[0]):
            call = linear_call(call, inner[0])
            function, args, takes = untyped_function(call), (args[0], inner[1]), (takes[0], call.inputs[1].shape)
        if makes_new(call):
            self._new.update(made)
        gives, dtypes = tuple([tuple(r.shape) for r in results]), tuple([r.dtype for r in results])
        self._lines.append(
            Line(TileCall(function, takes, takes, gives, gives, dtypes, (False,) * len(made)), args, made)
        )

    def depends_on_data(self) -> None:
        """What is called next depends on what tensors hold, or is for one device after the other."""
        self._is_fixed = False

    def recorded(self, result: Any, device: torch.device) -> Recorded | None:
        """All that was called on a device, on the way to this result, if the next call asks the same."""
        if not self._is_fixed:
            return None
        tree = tree_map_only(torch.Tensor, lambda tensor: _Name(self._name(tensor)), result)
        used = {leaf.name for leaf in tree_leaves(tree) if isinstance(leaf, _Name)}
        lines: list[Line] = []
        for line in reversed(self._lines):
            if line.results[0] in self._transposes and line.results[0] not in used:
                continue
            ends = tuple([name for name in dict.fromkeys((*line.args, *line.results)) if name not in used])
            used.update(ends)
            lines.append(Line(line.call, line.args, line.results, ends))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        made_once = frozenset(map(memory_of, (*self._constants.values(), *tensors)))
        names = {leaf.name for leaf in tree_leaves(tree) if isinstance(leaf, _Name)}
        is_new = names <= self._new
        return Recorded(StraightLine(lines[::-1]), self._inputs, self._constants, tree, made_once, is_new, device)

    def _name(self, tensor: torch.Tensor) -> str:
        name = self._names[id(tensor)]
        return self._same.get(name, name)

    def _named(self, tensor: torch.Tensor) -> str:
        self._count += 1
        self._names[id(tensor)] = name = f"t{self._count}"
        return name


@dataclass(frozen=True)
class _Name:
    """Of a tensor, in the form of a result."""

    name: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a function calls. `tree`: its result, in which names stand for tensors; all else in it is the same at every
    call. `made_once`: memory that may be that of results, and of later ones, too. `is_new`: all results are in memory
    that operators made for them."""

    lines: StraightLine
    inputs: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    tree: Any
    made_once: frozenset[int]
    is_new: bool
    device: torch.device

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The function's result for other inputs of the same shapes and dtypes."""
        held = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        self.lines.run(held)
        return map_tree(self.tree, lambda leaf: held[leaf.name] if isinstance(leaf, _Name) else leaf)
