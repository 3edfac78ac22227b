"""Element-wise arithmetic on MeshTensors: operators, and torch's element-wise functions.

Every device works on its own tile, so nothing moves: the tensors lie alike. Of tensors that are partial only what is
linear can be computed from their parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NoReturn

import torch

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.runtime.ambient import undisturbed, why_not_plain
from mesh_tensor.runtime.elementwise import copy, each, fill
from mesh_tensor.runtime.placement import Layout, Tiles, layout_of
from mesh_tensor.targets.tile_memory import empty_tile

_OPERANDS = "use numbers, and MeshTensors of one layout: mt.distribute(tensor, mesh, sharding) makes one"
_SUMS = ("add", "sub", "subtract")  # linear in both operands
_MULTIPLES = ("mul", "multiply", "div", "divide", "true_divide")  # linear in one, where the other is a number


@undisturbed
def compute(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tiles, Layout]:
    """The tiles of `func(*args, **named)`, and how they lie. Refused where `func` is not element-wise, the tensors do
    not lie alike, or their parts don't tell the result."""
    name = name_of(func, named)
    values = [*args, *named.values()]
    tensors = [value for value in values if isinstance(value, Arithmetic)]
    problems = [problem for value in values if (problem := _problem(value))]
    problems += [f"{shown(value)} beside a MeshTensor" for value in args if isinstance(value, str)]
    if problems:
        refuse(problems, where=_where(name), fix=_OPERANDS)
    layout = _common_layout(name, tensors)
    if layout.sharding.partial and not _is_linear(name, layout, tensors, args, named):
        _refuse_partial(name, layout)
    return _computed(func, args, named, tensors, layout, name)


def _operator(name: str) -> Callable[..., Any]:
    """Python's operator of that name as torch's tensors have it."""
    function = getattr(torch.Tensor, f"__{name}__")

    def operator(*operands: Any) -> Any:
        return _called(function, operands, {})

    operator.__name__ = f"__{name}__"
    return operator


def _called(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return type(args[0]).__torch_function__(func, (), args, named)  # type: ignore[attr-defined]  # MeshTensor's


class Arithmetic:
    """Python's operators on tensors that lie as tiles."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy's scalars leave operators to us

    _tiles: Tiles
    _layout: Layout

    __add__, __radd__ = _operator("add"), _operator("radd")
    __sub__, __rsub__ = _operator("sub"), _operator("rsub")
    __mul__, __rmul__ = _operator("mul"), _operator("rmul")
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("rtruediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("rfloordiv")
    __mod__, __rmod__ = _operator("mod"), _operator("rmod")
    __pow__, __rpow__ = _operator("pow"), _operator("rpow")
    __and__, __rand__ = _operator("and"), _operator("rand")
    __or__, __ror__ = _operator("or"), _operator("ror")
    __xor__, __rxor__ = _operator("xor"), _operator("rxor")
    __lshift__, __rlshift__ = _operator("lshift"), _operator("rlshift")
    __rshift__, __rrshift__ = _operator("rshift"), _operator("rrshift")
    __neg__, __abs__, __invert__ = _operator("neg"), _operator("abs"), _operator("invert")
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]  # gives a tensor, as torch's does
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("rmatmul")
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return refuse(
            "a MeshTensor is neither true nor false", fix="ask its whole tensor: .full(), as in .full().all()"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Numpy would take it for one object."""
        refuse("a MeshTensor is no array", fix="take its whole tensor: .full().numpy()")

    def __getitem__(self, _: Any) -> NoReturn:
        refuse("a MeshTensor has no items", fix="take its whole tensor, .full()[...], or a device's tile, .tile(rank)")

    def __setitem__(self, _: Any, __: Any) -> NoReturn:
        refuse("a MeshTensor's items can't be set", fix="write into a device's tile: .tile(rank)[...] = ...")

    def __getattr__(self, name: str) -> Any:
        """torch's element-wise methods; what else a tensor has is refused."""
        function = getattr(torch.Tensor, name, None)
        if name.startswith("_") or function is None:
            raise AttributeError(f"a MeshTensor has no attribute {name!r}")
        if function in ELEMENTWISE:
            return lambda *args, **named: _called(function, (self, *args), named)
        way_out = "its whole tensor, .full(), and a device's tile, .tile(rank), have it"
        raise AttributeError(f"a MeshTensor has no {name!r}, which is not element-wise: {way_out}")


def _problem(value: Any) -> str | None:
    """What is wrong with an argument."""
    if value is None or isinstance(value, (Number, str, torch.dtype, Arithmetic)):
        return None
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} beside a MeshTensor"
    if value.ndim:
        return f"a {type(value).__name__} of shape {tuple(value.shape)}, which lies on no mesh, beside a MeshTensor"
    found = why_not_plain(value)
    return None if found is None else f"a {type(value).__name__} beside a MeshTensor: {found[0]}"


def _common_layout(name: str, tensors: Sequence[Arithmetic]) -> Layout:
    """How the tensors lie, all of them but for replicated scalars."""
    layouts = [tensor._layout for tensor in tensors]
    first = next((layout for layout in layouts if layout.shape), layouts[0])
    problems = []
    for other in layouts:
        is_scalar = bool(first.shape) and not other.shape and not other.sharding.partial
        if other.sharding.mesh != first.sharding.mesh:
            problems.append(f"tensors on {first.sharding.mesh} and on {other.sharding.mesh}")
        elif other.shape != first.shape and not is_scalar:
            problems.append(f"tensors of shapes {first.shape} and {other.shape}")
        elif other.sharding != first.sharding and not is_scalar:
            problems.append(f"tensors as '{first.sharding}' and as '{other.sharding}'")
    if problems:
        why = "every device computes its own tile, and nothing is moved or broadcast for that"
        fix = f"bring them into one shape and layout: .redistribute({shown(first.sharding.text())})"
        refuse(list(dict.fromkeys(problems)), where=_where(name), why=why, fix=fix)
    return first


def _is_linear(
    name: str, layout: Layout, tensors: Sequence[Arithmetic], args: Sequence[Any], named: Mapping[str, Any]
) -> bool:
    """Whether the parts of sums, each taken by itself, are the parts of the result. Numbers that are not finite, and
    dtypes that change, make nan or other roundings of the neutral elements."""
    alike = all(t._layout.shape == layout.shape and t._layout.dtype == layout.dtype for t in tensors)
    if layout.dtype == torch.bool or not alike or any(op != "sum" for _, op in layout.sharding.partial):
        return False
    numbers = [value for value in (*args, *named.values()) if not isinstance(value, Arithmetic)]
    exact = (int, float) if layout.dtype.is_floating_point else (int,)
    if not all(type(number) in exact and math.isfinite(number) for number in numbers):
        return False
    if name in ("neg", "negative"):
        return True
    if name in _SUMS:
        return len(tensors) == 2
    if name not in _MULTIPLES or len(tensors) != 1 or len(numbers) != 1 or named:
        return False
    divides = "div" in name
    return not divides or (tensors[0] is args[0] and layout.dtype.is_floating_point and numbers[0] != 0)


def _refuse_partial(name: str, layout: Layout) -> NoReturn:
    sharding = layout.sharding
    over = ", ".join(f"{op} over {axis!r}" for axis, op in sharding.partial)
    refuse(
        f"{name} of a tensor that is partial ({over})",
        where=_where(name),
        why="a device holds a part of each value; only sums of such tensors and their multiples come from the parts",
        fix=f"reduce it first: .redistribute({shown(sharding.as_dict())})",
    )


def _computed(
    func: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    tensors: Sequence[Arithmetic],
    layout: Layout,
    name: str,
) -> tuple[Tiles, Layout]:
    """Every device's result, once where devices hold the same memory."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.sharding.mesh.num_devices):
        key = (layout.owner(rank), *(id(tensor._tiles[rank]) for tensor in tensors))
        groups.setdefault(key, []).append(rank)
    ranks = list(groups.values())
    made: list[torch.Tensor] = [torch.empty(0)] * len(ranks)

    def work(index: int) -> None:
        rank = ranks[index][0]
        with torch.no_grad():
            parts = {key: _part(value, rank) for key, value in named.items()}
            result = func(*(_part(value, rank) for value in args), **parts)
        if result is NotImplemented:
            refuse(f"no operands of {name}", where=_where(name), fix=_OPERANDS)
        made[index] = _padded(result, layout.tile_shape)

    each(work, len(ranks), math.prod(layout.tile_shape))
    tiles = {rank: tile for group, tile in zip(ranks, made, strict=True) for rank in group}
    return [tiles[rank] for rank in sorted(tiles)], layout_of(layout.shape, made[0].dtype, layout.sharding)


def _part(value: Any, rank: int) -> Any:
    return value._layout.valid_part(value._tiles, rank) if isinstance(value, Arithmetic) else value


def _padded(valid: torch.Tensor, tile_shape: tuple[int, ...]) -> torch.Tensor:
    """A whole tile with that valid part."""
    if tuple(valid.shape) == tile_shape:
        return valid.contiguous()
    tile = fill(empty_tile(tile_shape, valid.dtype, valid.device), 0)
    copy(tile[tuple(slice(0, size) for size in valid.shape)], valid)
    return tile


def _where(name: str) -> str:
    return f"{name} of MeshTensors"


_UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos "
    "atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc relu sign sgn floor ceil trunc round frac logical_not "
    "bitwise_not isnan isinf isfinite nan_to_num clamp clamp_min clamp_max clip gelu silu softplus elu leaky_relu "
    "hardtanh relu6 hardswish mish logsigmoid float double half bfloat16 zeros_like ones_like"
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
            if callable(function := getattr(place, name, None)):  # torch.float is a dtype
                found.setdefault(function, name)
    others = _REFLECTED_AND_OTHERS.split()
    for operator, name in (*_OPERATORS.items(), *zip(others, others, strict=True)):
        found.setdefault(getattr(torch.Tensor, f"__{operator}__"), name)
    return found


#: torch's element-wise functions, methods and operators, with their names. Those whose operands are reflected have
#: names of their own.
ELEMENTWISE = _functions()


def name_of(func: Callable[..., Any], named: Mapping[str, Any]) -> str:
    """The name of an element-wise function that is called so. Refused where it is not one, or is to write into what is
    there."""
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
