"""Which of torch's functions treat every element by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from mesh_tensor.base.errors import refuse

_UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos "
    "atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc relu sign sgn floor ceil trunc round frac logical_not "
    "bitwise_not isnan isinf isfinite nan_to_num clamp clamp_min clamp_max clip gelu silu softplus elu leaky_relu "
    "hardtanh relu6 hardswish mish logsigmoid"
)
_SEVERAL = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum minimum "
    "fmax fmin atan2 hypot copysign xlogy eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift where lerp addcmul addcdiv"
)
_OPERATORS = {"add": "add", "radd": "add", "sub": "sub", "mul": "mul", "rmul": "mul", "truediv": "div"}
_REFLECTED_AND_OTHERS = (
    "floordiv mod pow rsub rtruediv rfloordiv rmod rpow lshift rshift rlshift rrshift and rand or ror xor rxor eq ne "
    "lt le gt ge neg abs invert"
)
_PRODUCTS = (
    "matmul rmatmul mm bmm mv dot inner outer einsum linear addmm baddbmm conv1d conv2d conv3d tensordot "
    "scaled_dot_product_attention"
)


def _functions() -> dict[Callable[..., Any], str]:
    found: dict[Callable[..., Any], str] = {}
    for name in f"{_UNARY} {_SEVERAL}".split():
        for place in (torch, torch.Tensor, torch.nn.functional):
            if function := getattr(place, name, None):
                found.setdefault(function, name)
    others = _REFLECTED_AND_OTHERS.split()
    for operator, name in (*_OPERATORS.items(), *zip(others, others, strict=True)):
        found.setdefault(getattr(torch.Tensor, f"__{operator}__"), name)
    return found


#: torch's element-wise functions, methods and operators, with their names. Those whose operands are reflected have
#: names of their own.
ELEMENTWISE = _functions()


def name_of(func: Callable[..., Any], named: Mapping[str, Any]) -> str:
    """The name of an element-wise function that is called so.

    Raises:
        MeshTensorError: it is not one, or is to write into what is there.
    """
    refused = [key for key in ("out", "inplace") if named.get(key) is not None and named[key] is not False]
    whole = "or take its whole tensor, .full(), or a device's tile, .tile(rank)"
    if refused:
        refuse(f"`{refused[0]}` is given for a MeshTensor", why="results are new tensors", fix=f"leave it out, {whole}")
    name = str(getattr(func, "__name__", func))
    return ELEMENTWISE.get(func) or _refuse(name.removeprefix("__").removesuffix("__"), whole)


def _refuse(name: str, whole: str) -> NoReturn:
    if name in _PRODUCTS.split():
        refuse(
            f"torch's {name} can't be taken of a MeshTensor",
            why="what it sums over may be split, and no sharding rule says how",
            fix=f"compile a kernel for it (mt.compile), or a module (mt.distribute_module), {whole}",
        )
    refuse(
        f"torch's {name} can't be taken of a MeshTensor",
        why="it is not one of the element-wise functions that are known",
        fix=f"use those and operators, a kernel (mt.compile) or a module (mt.distribute_module), {whole}",
    )
