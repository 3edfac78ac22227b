"""ImportedModule: what the frontends give, how names of elsewhere become names of a module, and whether it computes
what the model computed where it comes from."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NoReturn

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree
from tvm import ir

from mesh_tensor.annotations.names import Fresh, flat_arguments
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.targets.dtypes import as_floats, is_plain

from .constants import Constants

# Results that are smaller throughout are compared as if they were this large: what is zero but for rounding, as the
# mean of what comes after a batch norm, has no scale of its own.
_NOTHING = 1e-4

#: Times what rounding changed in torch's own results, others may differ from these; of float64 that tells.
MORE_ROUNDING = 8.0
_MOST_ROUNDED = 1e-2  # of the largest value


@dataclass(frozen=True, eq=False, repr=False)
class ImportedModule:
    """A Relax module that was imported, with its weights.

    mod        the module; its function takes the inputs, then the weights
    params     the weights, by parameter name
    names      from the source's names of values ("fc.weight") to the module's ("fc_weight")
    state      names of weights that a call updates; their new values are the function's last results
    buffers    names of weights that training doesn't change
    frozen     names of parameters that require no gradient
    form       how the model is called and what it returns (nested inputs and results); None: plain tensors
    constants  buffers of the model that are constants in the module
    """

    mod: ir.IRModule
    params: dict[str, torch.Tensor]
    names: dict[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    form: CallForm | None = None
    constants: Constants = field(default_factory=Constants)

    @property
    def complex_inputs(self) -> frozenset[str] | None:
        """The names of the inputs that are complex tensors; None where that isn't known."""
        if self.form is None:
            return None
        numbers = [number for number in range(self.form.inputs.num_leaves) if number not in self.form.given]
        found = zip(self.mod["main"].params, numbers, strict=False)
        return frozenset(param.name_hint for param, number in found if number in self.form.complex_inputs)

    def __repr__(self) -> str:
        functions = ", ".join(sorted(var.name_hint for var, _ in self.mod.functions_items()))
        return f"ImportedModule({functions}; {len(self.params)} weights)"


def children_of(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """What a structure is made of; torch before 2.10 has it as an attribute."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def identifiers(names: list[str], taken: list[str]) -> dict[str, str]:
    """Each name as an identifier that no other one and none of `taken` has: "a.b" is a_b; `p_` stands in front of a
    name that begins with a digit."""
    fresh = Fresh(taken)
    return {name: fresh.name(_identifier(name)) for name in names}


def _identifier(name: str) -> str:
    made = "".join(char if char.isalnum() and char.isascii() else "_" for char in name)
    return f"p_{made}" if not made or made[0].isdigit() or keyword.iskeyword(made) else made


def refuse_differences(
    results: Any,
    expected: Sequence[torch.Tensor],
    origin: str,
    where: str,
    fix: str,
    computed_in: Iterable[torch.dtype] = (),
    exact: Callable[[], Sequence[torch.Tensor]] = tuple,
    why: str = "TVM's importer reads some operator in it differently",
) -> None:
    """Refuse results (a tensor or a tuple of them) that are not those that `origin` ("torch") gave. `computed_in`: what
    values they are made of have for dtypes. `exact`: what `origin` gives in float64, if that is known: results that
    rounding changes more than others may differ by a few times what it changed in `origin`'s, and those that are near
    float64's are right however far `origin`'s are."""
    inside = max(map(_tolerance, computed_in), default=0.0)
    results = list(results) if isinstance(results, tuple) else [results]
    if len(results) != len(expected):
        refuse(f"there are {len(results)} results, and {len(expected)} of {origin}", where=where, fix=fix)
    errors = [_error(result, meant.detach()) for result, meant in zip(results, expected, strict=True)]
    may = [_tolerance(meant.dtype) and max(_tolerance(meant.dtype), inside) for meant in expected]
    wrong = [index for index, error in enumerate(errors) if error > may[index]]
    if wrong and len(wider := exact()) == len(expected):
        wide = {i: wider[i].to(expected[i].dtype) for i in wrong}
        rounded = {i: _error(wide[i], expected[i].detach()) for i in wrong}
        wrong = [i for i in wrong if errors[i] > min(MORE_ROUNDING * rounded[i], _MOST_ROUNDED)]
        wrong = [i for i in wrong if _error(results[i], wide[i]) > may[i]]
    problems = [f"result {i} differs from {origin}'s by {errors[i]:.2g} of its largest value" for i in wrong]
    if problems:
        refuse(
            problems,
            where=where,
            why=why,
            fix=f"{fix}; `check=False` leaves this check out",
        )


def _error(result: torch.Tensor, meant: torch.Tensor) -> float:
    """The largest difference, by the largest value; what is not finite has to be equal."""
    if result.shape != meant.shape or result.dtype != meant.dtype:
        return float("inf")
    wide, other = result.to(torch.float64), meant.to(torch.float64)
    finite = other.isfinite()
    if (
        not torch.equal(wide.nan_to_num(7.0)[~finite], other.nan_to_num(7.0)[~finite])
        or not wide[finite].isfinite().all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((wide - other)[finite].abs().max() / other[finite].abs().max().clamp_min(_NOTHING))


def _tolerance(dtype: torch.dtype) -> float:
    """What sums in another order may change; nothing in whole numbers."""
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0


@dataclass(frozen=True, eq=False)
class CallForm:
    """A model was recorded with arguments of the structure `inputs` (positional ones, and those by name), and gave the
    structure `results`. Of their leaves, in order, those that are no tensors are constants: number -> value.
    `complex_inputs`, `complex_results`: the numbers of those that are pairs of floats in the module."""

    inputs: pytree.TreeSpec
    results: pytree.TreeSpec
    given: Mapping[int, Any]
    made: Mapping[int, Any]
    complex_inputs: frozenset[int] = frozenset()
    complex_results: frozenset[int] = frozenset()

    def is_other(self, name: str) -> bool:
        """Whether the model was not recorded with an argument of that name."""
        return name not in self.inputs.unflatten([None] * self.inputs.num_leaves)[1]

    def tensors(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The tensors among the arguments, in order.

        Raises:
            MeshTensorError: arguments of another structure, or a number other than the one that was recorded.
        """
        if not named and len(args) == self.in_order and all(type(arg) is torch.Tensor for arg in args):
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
    def in_order(self) -> int | None:
        """How many tensors the model takes in order, if it takes nothing else."""
        in_order, named = children_of(self.inputs)
        plain = not named.num_children and not self.given and all(child.is_leaf() for child in children_of(in_order))
        return in_order.num_children if plain else None

    def _refuse(self, what: str, recorded: str) -> NoReturn:
        refuse(
            what,
            where="a call of a module from torch",
            why=f"the model was recorded with {recorded}",
            fix="call it as it was recorded",
        )

    def with_floats(self, tensors: Iterable[Any]) -> list[Any]:
        """The tensors among the arguments, complex ones as pairs of floats where the model was recorded with such."""
        if not self.complex_inputs:
            return list(tensors)
        numbers = [number for number in range(self.inputs.num_leaves) if number not in self.given]
        found = zip(tensors, chain(numbers, repeat(None)), strict=False)  # there may be too few, or too many
        return [as_floats(tensor) if number in self.complex_inputs else tensor for tensor, number in found]

    def result(self, tensors: Sequence[Any]) -> Any:
        """The results, in the model's structure."""
        if self.results.is_leaf() and not self.made and not self.complex_results:
            (result,) = tensors
            return result
        rest = iter(tensors)
        leaves = [self.made[n] if n in self.made else next(rest) for n in range(self.results.num_leaves)]
        for number in self.complex_results:
            if is_plain(leaves[number]):  # of others, parts are on other devices
                leaves[number] = torch.view_as_complex(leaves[number].contiguous())
        return self.results.unflatten(leaves)


def call_tensors(
    form: CallForm | None, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The tensors of a call, in order, and by parameter: those of arguments that the model was not recorded with.
    Complex ones are pairs of floats, as modules have them, where the model was recorded with such."""
    made, passed = _call_tensors(form, args, named)
    given = [as_floats(tensor) for tensor in made] if form is None else form.with_floats(made)
    return given, {name: as_floats(tensor) for name, tensor in passed.items()}


def _call_tensors(
    form: CallForm | None, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Iterable[Any], Mapping[str, Any]]:
    if form is None:
        return flat_arguments(args), named
    passed = {name: tensor for name, tensor in named.items() if form.is_other(name)}
    if passed and len(passed) == len(named) and (not args or form.in_order is not None):
        return args, passed
    return form.tensors(args, {name: given for name, given in named.items() if name not in passed}), passed


def form_of(program: torch.export.ExportedProgram) -> CallForm:
    """The form of a program."""
    specs, spec = program.graph_signature, program.call_spec
    given = [spec.arg for spec in specs.input_specs if spec.kind == InputKind.USER_INPUT]
    made = [spec.arg for spec in specs.output_specs if spec.kind in (OutputKind.USER_OUTPUT, *JOINT)]
    results = pytree.tree_structure((0,) * len(made)) if is_joint(program) else spec.out_spec
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}

    def complex_ones(leaves: Sequence[Any]) -> frozenset[int]:
        found = enumerate(values.get(leaf.name) for leaf in leaves)
        return frozenset(n for n, value in found if isinstance(value, torch.Tensor) and value.is_complex())

    return CallForm(spec.in_spec, results, _constants(given), _constants(made), complex_ones(given), complex_ones(made))


#: What a program of forward and backward gives: the loss, and gradients.
JOINT = (OutputKind.LOSS_OUTPUT, OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


def is_joint(program: torch.export.ExportedProgram) -> bool:
    """Whether the program gives a loss and gradients."""
    return any(spec.kind in JOINT for spec in program.graph_signature.output_specs)


def _constants(leaves: Sequence[Any]) -> dict[int, Any]:
    return {number: leaf.value for number, leaf in enumerate(leaves) if isinstance(leaf, ConstantArgument)}
