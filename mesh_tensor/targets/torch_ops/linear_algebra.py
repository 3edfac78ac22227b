"""Products of matrices; Fourier transforms of pairs of floats; operators of torch's own: each call is one of
torch's.

Who multiplies float32 matrices on a CPU: MKL, which is torch's choice, or oneDNN, which torch brings as well.

The rule: oneDNN for large ones on a processor with AVX-512 that isn't Intel's, since MKL uses half of its width there.
Not for sums over rows, as gradients of weights are, whose operands it copies to turn them. Nothing is measured for it,
so that all processes on a machine decide alike. Where they differ in the last bits, it is by the shapes alone:
oneDNN's sums were the same for transposed and strided matrices, and for any number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.aten import ANY, ATEN, any_of, arguments_of
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.linear_algebra import FFT, LINEAR, MATMUL_ADD, fft_arguments
from mesh_tensor.targets.dtypes import torch_dtype

from .table import NEW_IF, Function, same_for_all, torch_op

Tensor = torch.Tensor
Linear = Callable[..., Tensor]  # of (..., summed), (columns, summed) and, if there is one, a bias of (columns,)

_LEAST = 1 << 24  # multiplications: below that, what it takes to turn matrices into its own form weighs more
_LEAST_ROWS, _LEAST_SUMMED = 8, 64  # for fewer, oneDNN would copy more than it computes


def linear(rows: int, summed: int, columns: int, dtype: torch.dtype) -> Linear:
    """The product of `rows` rows with a transposed matrix, and a bias; of at least that many where rows are open."""
    large = rows >= _LEAST_ROWS and summed >= _LEAST_SUMMED and rows * summed * columns >= _LEAST
    return _by_onednn if dtype is torch.float32 and large and prefers_onednn() else F.linear


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies large float32 matrices faster than MKL on this processor, and torch has both."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return there and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _vendor() != "GenuineIntel"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "GenuineIntel"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "GenuineIntel")


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator has no gradients of its own, takes memory of CPUs, and reads biases as if they were contiguous."""
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if recorded or not x.is_cpu:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(
        x, weight, None if bias is None else bias.contiguous(), "none", [], ""
    )


same_for_all({"outer": torch.outer})


@torch_op("matmul")
def _matmul(call: OpCall) -> Function:
    """With an `out_dtype`, the operands are cast to it first."""
    dtype = torch_dtype(call.outputs[0].dtype)
    if not all(torch_dtype(t.dtype) is dtype for t in call.inputs):
        return lambda a, b: torch.matmul(a.to(dtype), b.to(dtype))
    if call.inputs[0].ndim < 2 or call.inputs[1].ndim != 2:
        return torch.matmul
    product = _product(call)
    return torch.matmul if product is F.linear else lambda x, matrix: product(x, matrix.t())


@torch_op(LINEAR)
def _linear(call: OpCall) -> Function:
    return _product(call)


@torch_op(MATMUL_ADD)
def _matmul_add(call: OpCall) -> Function:
    product = _product(call)
    return lambda x, matrix, bias: product(x, matrix.t(), bias)


def _product(call: OpCall) -> Linear:
    """What multiplies the rows of the first operand with the second one, a matrix."""
    x, dtype = call.inputs[0], torch_dtype(call.outputs[0].dtype)
    return linear(math.prod(x.shape[:-1]), x.shape[-1], call.outputs[0].shape[-1], dtype)


@torch_op("einsum")
def _einsum(call: OpCall) -> Function:
    subscripts = call.attr("subscripts")
    return _over_rows(call) or (lambda *tensors: torch.einsum(subscripts, *tensors))


def _over_rows(call: OpCall) -> Function | None:
    """Such an einsum as one product of matrices, where torch.einsum would copy its operands first."""
    rows = _rows_of(call)
    if rows is None:
        return None
    shape = call.outputs[0].shape

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = rows.matrices(a, b)
        return (a @ b).view(shape)

    return product


NEW_IF["einsum"] = lambda call: _rows_of(call) is not None  # others may be views


@dataclass(frozen=True)
class _Rows:
    """The operands of an einsum over their leading dims as matrices of all rows: their shapes, the one whose columns
    are the result's rows first; `turned`: that is the second operand."""

    first: tuple[int, int]
    second: tuple[int, int]
    turned: bool

    def matrices(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices whose product is the result."""
        a, b = (b, a) if self.turned else (a, b)
        return a.reshape(self.first).t(), b.reshape(self.second)


def _rows_of(call: OpCall) -> _Rows | None:
    """What an einsum over the leading dims of two operands, as "abx,aby->xy", sums; None of others. Gradients of
    weights are such."""
    left, _, right = call.attr("subscripts").replace(" ", "").partition("->")
    terms, dtypes = left.split(","), {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    if len(terms) != 2 or "." in left or len(dtypes) > 1:
        return None
    shared = len(commonprefix(terms))
    shapes = [tensor.shape for tensor in call.inputs]
    ends = [term[shared:] for term in terms]
    plain = all(len(set(letters)) == len(letters) for letters in (*terms, ends[0] + ends[1]))  # no diagonals
    if not (
        plain and shared and shapes[0][:shared] == shapes[1][:shared] and right in ("".join(ends), ends[1] + ends[0])
    ):
        return None
    rows = math.prod(shapes[0][:shared])
    first, second = ((rows, math.prod(shape[shared:])) for shape in shapes)
    turned = right != "".join(ends)
    return _Rows(second, first, True) if turned else _Rows(first, second, False)


def added_function(call: OpCall) -> Function | None:
    """A function of the operands of a product of matrices and a tensor like its result, to which it adds that; None
    where torch has no such one, or another library multiplies faster."""
    if len({tensor.dtype for tensor in (*call.inputs, *call.outputs)}) > 1:
        return None
    rows = _rows_of(call) if call.name == "einsum" else None
    if rows is not None:
        shape, is_matrix = (rows.first[1], rows.second[1]), len(call.outputs[0].shape) == 2

        def add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            (total if is_matrix else total.view(shape)).addmm_(*rows.matrices(a, b))
            return total

        return add
    plain = call.name in ("matmul", LINEAR) and [tensor.ndim for tensor in call.inputs] == [2, 2]
    if not plain or _product(call) is not F.linear:
        return None
    turned = call.name == LINEAR
    return lambda a, b, total: total.addmm_(a, b.t() if turned else b)


@torch_op(*ATEN)
def _aten(call: OpCall) -> Function:
    """The operator with the arguments that the call states."""
    name = call.expr.args[0].global_symbol.removeprefix("aten.")
    return partial(_with_arguments, _overload(name), *arguments_of(call))


@torch_op(ANY)
def _any(call: OpCall) -> Function:
    """As above, of an operator without a rule of its own; complex numbers come and go as pairs of floats."""
    name, leading, args, kwargs, pairs = any_of(call)
    op = _overload(name)
    if not is_function(op):
        refuse(f"aten.{name} is no function of tensors", where=str(call.expr), fix="write it with other operators")
    tensors = (*call.inputs, *call.outputs)
    known = independent_dims(op, [t.shape[: t.ndim - pair] for t, pair in zip(tensors, pairs, strict=True)])
    if leading != known and leading != 0:
        refuse(f"{leading} leading dims of aten.{name} are not independent", where=str(call.expr), fix=_AGAIN)
    function = partial(_with_arguments, op, args, kwargs)
    return partial(_of_pairs, function, pairs) if any(pairs) else function


def _of_pairs(function: Function, pairs: Sequence[bool], *tensors: torch.Tensor) -> Any:
    """A function of complex numbers as one of pairs of floats."""
    given = [torch.view_as_complex(t.contiguous()) if pair else t for t, pair in zip(tensors, pairs, strict=False)]
    made = function(*given)
    if isinstance(made, torch.Tensor):
        return torch.view_as_real(made.resolve_conj()) if made.is_complex() else made
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in made]


def is_function(op: Any) -> bool:
    """Whether the results of an operator of torch's follow from the values of its operands, and are tensors of its
    own: it is not random, writes and views nothing, and does not ask how tensors lie in memory."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
    aliases = any(argument.alias_info for argument in (*op._schema.arguments, *op._schema.returns))
    name = op._schema.name.removeprefix("aten::")
    excluded = name.startswith(_OF_MEMORY) or any(part in name for part in _WRITES)
    return takes_tensors and not (aliases or excluded or _UNSAID & set(op.tags))


def independent_dims(op: Any, shapes: Sequence[Sequence[Any]]) -> int | None:
    """How many leading dims of operands and results, which have these shapes, are independent in an operator of
    torch's; None if it works element by element, in the order of broadcasting."""
    base, first = op._schema.name.removeprefix("aten::"), shapes[0]
    if torch.Tag.pointwise in op.tags or base in _UNTAGGED:
        return None
    if base == "binary_cross_entropy" and shapes[-1] == first:  # not reduced
        return None
    last = 2 if base in _OF_MATRICES.split() else _OF_PLACES.get(base, len(first))
    shared = first[: max(0, len(first) - last)]
    return len(shared) if all(shape[: len(shared)] == shared for shape in shapes) else 0


_AGAIN = "import the model again"
# Of stacks of matrices, each by itself.
_OF_MATRICES = (
    "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky cholesky_inverse"
    " cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_householder_product"
    " linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor"
    " linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve linalg_solve_ex"
    " linalg_solve_triangular lu_unpack ormqr triangular_solve"
)
_UNTAGGED = ("hardswish", "hardswish_backward")  # which work element by element, and torch doesn't say so
# Of how many last dims an operator of one tensor looks at places together.
_OF_PLACES = {
    **dict.fromkeys(("_adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"), 2),
    **dict.fromkeys(("_adaptive_avg_pool3d", "avg_pool3d", "max_pool3d"), 3),
}
_IN_ONE_PIECE = (torch.ops.aten._pdist_forward.default,)  # which take no views of what lies in another order
_WRITES = ("batch_norm", "instance_norm", "moving_avg")  # running statistics, whatever their signatures say
_UNSAID = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_OF_MEMORY = ("as_strided", "empty", "new_empty", "resize", "_resize", "_to_sparse", "to_sparse", "view", "_reshape")


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload, None)


def _with_arguments(op: Any, args: Any, kwargs: Any, *tensors: torch.Tensor) -> Any:
    if op in _IN_ONE_PIECE:
        tensors = tuple([tensor.contiguous() for tensor in tensors])
    return op(*_filled(args, tensors), **{name: _filled(value, tensors) for name, value in kwargs.items()})


def _filled(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Arguments with tensors and dtypes in their places."""
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return torch_dtype(value["dtype"])
    return {key: _filled(item, tensors) for key, item in value.items()}


@torch_op(FFT)
def _fft(call: OpCall) -> Function:
    """By torch's own, of complex numbers."""
    kind, dims, normalization, option = fft_arguments(call)
    transform = getattr(torch.ops.aten, f"_fft_{kind}").default
    option = option if kind == "c2r" else bool(option)

    def fft(x: torch.Tensor) -> torch.Tensor:
        given = x if kind == "r2c" else torch.view_as_complex(x.contiguous())
        made = transform(given, dims, normalization, option)
        return made if kind == "c2r" else torch.view_as_real(made)

    return fft
