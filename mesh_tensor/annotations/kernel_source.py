"""What people hand in as a kernel: a PrimFunc, or what one is made of."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

from tilelang.jit import JITImpl
from tvm import ir, tirx

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown

_SIZES = 'annotate(f, mesh, shardings, sizes={"M": 128, ...})'
_OUT_IDX_ATTR = "tilelang_out_idx"


def check_kernel(func: Any) -> tirx.PrimFunc:
    """`func`, if it is a PrimFunc, or a MeshTensorError with how one is made of it."""
    if isinstance(func, tirx.PrimFunc):
        return func
    func = _untuned(func)
    if isinstance(func, JITImpl):
        _refuse_jit(func)
    name = getattr(func, "__name__", "")
    if inspect.isfunction(func):
        arguments = ", ".join(f"{param}=..." for param in inspect.signature(func).parameters)
        fix = f"call it with sizes, and pass what it returns: {name}({arguments})"
        refuse(f"{name!r} is no kernel (PrimFunc), but a function that makes one", fix=fix)
    fix = "give what @T.prim_func makes; of a @tilelang.jit function, what its get_tir(...) gives"
    if isinstance(getattr(func, "prim_func", None), tirx.PrimFunc):
        fix = "give the PrimFunc that it was compiled from: its .prim_func"
    if isinstance(func, ir.IRModule):
        fix = 'give one of its functions: mod["main"]; of a module with Relax functions, mt.annotate_module takes it'
    return refuse(f"{_named(func)} is no kernel (PrimFunc)", fix=fix)


def of_jit(func: Any, sizes: Mapping[str, Any] | None) -> Any:
    """The PrimFunc of a @tilelang.jit function for these sizes; anything else as it is.

    Raises:
        MeshTensorError: names all the sizes that are missing, unknown, or given to what has its sizes already.
    """
    func = _untuned(func)
    if not isinstance(func, JITImpl):
        if sizes is not None and isinstance(func, tirx.PrimFunc):
            refuse(f"sizes={shown(sizes)} for a PrimFunc", why="its sizes are in it", fix="leave `sizes` out")
        return func
    given = {} if sizes is None else sizes
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        refuse(f"`sizes` is {shown(sizes)}, which is not a dict from names", where=_where(func), fix=_SIZES)
    if missing := [name for name in _needed(func) if name not in given]:
        known = func.signature.parameters  # where it has none, its constants are not known yet
        _refuse_sizes(func, missing, [name for name in given if name not in known], _needed(func))
    made = _get_tir(func, given)
    if func.out_idx is not None:
        out_idx = [func.out_idx] if isinstance(func.out_idx, int) else list(func.out_idx)
        made = made.with_attr(_OUT_IDX_ATTR, out_idx)
    return made


def _untuned(func: Any) -> Any:
    """The @tilelang.jit function below a @tilelang.autotune; what it tunes are sizes like others."""
    below = getattr(func, "jit_impl", None)
    return below if isinstance(below, JITImpl) else func


def _get_tir(func: Any, given: Mapping[str, Any]) -> tirx.PrimFunc:
    """What TileLang makes of the function. Its constants (`T.const`) are known once it was traced; TileLang takes any
    other name without a word."""
    own = {name: size for name, size in given.items() if name in func.signature.parameters}
    more = [name for name in given if name not in own]
    try:
        made = func.get_tir(**own)
    except ValueError:
        constants = _constants(func)
        if not constants:
            raise
        missing, unknown = [n for n in constants if n not in given], [n for n in more if n not in constants]
        if missing or unknown:
            _refuse_sizes(func, missing, unknown, constants)
        return func.get_tir(**given)
    if more:
        _refuse_sizes(func, [], more, [])
    return made


def _constants(func: Any) -> list[str]:
    """The names of what was `T.const` in the function when it was traced."""
    return sorted({str(var.name) for template in func.func.p1_cache.values() for var in template.constexprs or ()})


def _refuse_sizes(func: Any, missing: list[str], unknown: list[str], needed: list[str]) -> NoReturn:
    known = [*needed, *missing, *(name for name in func.signature.parameters if name not in func.func.tensor_args)]
    names = list(dict.fromkeys(known))
    facts = [f"no size is given for {name!r}" for name in missing]
    facts += [f"there is no size {name!r} (sizes: {listing(names)}){did_you_mean(name, names)}" for name in unknown]
    example = ", ".join(f'"{name}": ...' for name in names)
    refuse(facts, where=_where(func), fix=f"annotate(f, mesh, shardings, sizes={{{example}}})")


def _refuse_jit(func: Any) -> NoReturn:
    names = _needed(func)
    arguments = ", ".join(f"{name}=..." for name in names) or "..."
    refuse(
        f"{_name(func)!r} is no kernel (PrimFunc), but a @tilelang.jit function, which makes one for every size",
        fix=f"pass .get_tir({arguments}), or say the sizes to mt.annotate: {_SIZES}",
    )


def _needed(func: Any) -> list[str]:
    """The parameters, but for tensors, that have no default."""
    tensors, kinds = func.func.tensor_args, (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, param in func.signature.parameters.items()
        if param.default is param.empty and name not in tensors and param.kind not in kinds
    ]


def _where(func: Any) -> str:
    return f"the @tilelang.jit function {_name(func)!r}"


def _name(func: Any) -> str:
    return str(getattr(func.func, "__name__", "main"))


def _named(value: Any) -> str:
    """A value as messages show it: None and texts as they are, of everything else what kind of thing it is."""
    return shown(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
