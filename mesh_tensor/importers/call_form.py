"""The form in which a torch model takes its inputs and gives its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from mesh_tensor.base.errors import listing, refuse, shown


@dataclass(frozen=True, eq=False)
class CallForm:
    """A model was recorded with arguments of the structure `inputs` (positional ones, and those by name), and gave the
    structure `results`. Of their leaves, in order, those that are no tensors are constants: number -> value."""

    inputs: pytree.TreeSpec
    results: pytree.TreeSpec
    given: Mapping[int, Any]
    made: Mapping[int, Any]

    def is_other(self, name: str) -> bool:
        """Whether the model was not recorded with an argument of that name."""
        return name not in self.inputs.unflatten([None] * self.inputs.num_leaves)[1]

    def tensors(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The tensors among the arguments, in order.

        Raises:
            MeshTensorError: arguments of another structure, or a number other than the one that was recorded.
        """
        if not named and len(args) == self._in_order and all(type(arg) is torch.Tensor for arg in args):
            return list(args)
        recorded, recorded_named = self.inputs.unflatten([None] * self.inputs.num_leaves)
        if set(named) != set(recorded_named) or len(args) != len(recorded):
            self._refuse(
                f"{len(args)} arguments in order and {listing(list(named)) if named else 'none'} by name",
                f"{len(recorded)} in order and {listing(list(recorded_named)) if recorded_named else 'none'} by name",
            )
        leaves, found = pytree.tree_flatten((tuple(args), {name: named[name] for name in recorded_named}))
        if found != self.inputs:
            self._refuse(f"arguments of the structure {shown(str(found))}", shown(str(self.inputs)))
        problems = [
            f"argument {number} is {shown(leaves[number])}, but the model was recorded with {shown(value)}"
            for number, value in self.given.items()
            if type(leaves[number]) is not type(value) or leaves[number] != value
        ]
        if problems:
            refuse(problems, where="a call of a module from torch", fix="export the model with that value")
        return [leaf for number, leaf in enumerate(leaves) if number not in self.given]

    @cached_property
    def _in_order(self) -> int | None:
        """How many tensors, and nothing else, the model takes in order."""
        in_order, named = self.inputs.children()
        plain = not named.num_children and not self.given and all(child.is_leaf() for child in in_order.children())
        return in_order.num_children if plain else None

    def _refuse(self, what: str, recorded: str) -> NoReturn:
        refuse(
            what,
            where="a call of a module from torch",
            why=f"the model was recorded with {recorded}",
            fix="call it as it was recorded",
        )

    def result(self, tensors: Sequence[Any]) -> Any:
        """The results, in the model's structure."""
        if self.results.is_leaf() and not self.made:
            (result,) = tensors
            return result
        rest = iter(tensors)
        count = self.results.num_leaves
        return self.results.unflatten(
            [self.made[number] if number in self.made else next(rest) for number in range(count)]
        )


def form_of(program: torch.export.ExportedProgram) -> CallForm:
    """The form of a program."""
    specs, spec = program.graph_signature, program.call_spec
    given = [spec.arg for spec in specs.input_specs if spec.kind == InputKind.USER_INPUT]
    made = [spec.arg for spec in specs.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    return CallForm(spec.in_spec, spec.out_spec, _constants(given), _constants(made))


def _constants(leaves: Sequence[Any]) -> dict[int, Any]:
    return {number: leaf.value for number, leaf in enumerate(leaves) if isinstance(leaf, ConstantArgument)}
