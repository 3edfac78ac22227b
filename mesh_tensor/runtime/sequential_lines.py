"""What run_sequential found a function to compute for operands of some shapes, as one Python function.

A call is interpreted once, and what it asked of torch is written down. As all sizes are known, the next one asks the
same, unless something looks at data to decide what comes next (R.If, R.assert_op).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mesh_tensor.targets.straight_line import Line, StraightLine, TileCall
from mesh_tensor.targets.tile_memory import memory_of


class Recorder:
    """Writes down what is called while a function of these inputs is interpreted. Tensors are known by the objects that
    they are, so each input has to be one of its own; an object's name is that of the last tensor that was it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._names: dict[int, str] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._lines: list[Line] = []
        self._count, self._is_fixed = 0, True
        self._inputs = tuple([self._named(tensor) for tensor in inputs])

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is the same at every call."""
        self._constants[self._named(tensor)] = tensor
        return tensor

    def called(
        self, function: Callable[..., Any], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """The function has given these results, in a sequence, for these operands."""
        if not self._is_fixed:
            return
        args = tuple([self._names[id(tensor)] for tensor in operands])
        made = tuple([self._named(tensor) for tensor in results])
        takes, gives = (tuple([tuple(tensor.shape) for tensor in tensors]) for tensors in (operands, results))
        dtypes = tuple([tensor.dtype for tensor in results])
        call = TileCall(function, takes, takes, gives, gives, dtypes, (False,) * len(made))
        self._lines.append(Line(call, args, made))

    def depends_on_data(self) -> None:
        """What is called next depends on what tensors hold, or is for one device after the other."""
        self._is_fixed = False

    def recorded(self, result: Any, device: torch.device) -> Recorded | None:
        """All that was called on a device, on the way to this result, if the next call asks the same."""
        if not self._is_fixed:
            return None
        tree = tree_map_only(torch.Tensor, lambda tensor: _Name(self._names[id(tensor)]), result)
        used = {leaf.name for leaf in tree_leaves(tree) if isinstance(leaf, _Name)}
        lines: list[Line] = []
        for line in reversed(self._lines):
            ends = tuple([name for name in dict.fromkeys((*line.args, *line.results)) if name not in used])
            used.update(ends)
            lines.append(Line(line.call, line.args, line.results, ends))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        made_once = frozenset(map(memory_of, (*self._constants.values(), *tensors)))
        return Recorded(StraightLine(lines[::-1]), self._inputs, self._constants, tree, made_once, device)

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
    call. `made_once`: memory that may be that of results, and of later ones, too."""

    lines: StraightLine
    inputs: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    tree: Any
    made_once: frozenset[int]
    device: torch.device

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The function's result for other inputs of the same shapes and dtypes."""
        held = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        self.lines.run(held)
        return self._of(self.tree, held)

    def _of(self, tree: Any, held: dict[str, torch.Tensor]) -> Any:
        if isinstance(tree, tuple):
            return tuple([self._of(item, held) for item in tree])
        return held[tree.name] if isinstance(tree, _Name) else tree
