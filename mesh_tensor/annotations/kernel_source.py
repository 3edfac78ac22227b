"""What people hand in as a kernel: a PrimFunc, or what one is made of; and what goes on in its body, which TileLang
traces: our own errors come alone, and say at which line; which part of a buffer a copy of blocks is about."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import tvm_ffi
from tilelang.jit import JITImpl
from tilelang.language.eager.builder import Builder
from tvm import ir, tirx

from mesh_tensor.base.blocks import ceildiv
from mesh_tensor.base.errors import MeshTensorError, did_you_mean, listing, refuse, shown
from mesh_tensor.base.recent import made_once
from mesh_tensor.tir.nodes import function_name, int_or
from mesh_tensor.tir.plain_statements import with_contiguous_rows
from mesh_tensor.tir.prover import Prover

from .annotation import BufferAnnotation, is_int

_SIZES = 'annotate(f, mesh, shardings, sizes={"M": 128, ...})'
_OUT_IDX_ATTR = "tilelang_out_idx"
_MODULES = {"ExportedProgram", "ImportedModule", "TrainingStep"}
_RECENT = 64  # kernels whose sizes were looked at


def check_kernel(func: Any) -> tirx.PrimFunc:
    """`func`, with contiguous rows, if it is a PrimFunc, or a MeshTensorError with how one is made of it."""
    if isinstance(func, tirx.PrimFunc):
        _refuse_negative(func)
        return with_contiguous_rows(func)
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
    if hasattr(func, "state_dict") or type(func).__name__ in _MODULES:
        fix = (
            "of models and modules: mt.distribute_module(mt.from_torch(torch.export.export(model, inputs)), mesh, ...)"
        )
    return refuse(f"{_named(func)} is no kernel (PrimFunc)", fix=fix)


def _refuse_negative(func: tirx.PrimFunc) -> None:
    if problems := _negative(func.buffer_map):
        where, fix = f"kernel {function_name(func)!r}", "make the kernel for sizes that leave something"
        refuse(problems, where=where, why="no size is below 0", fix=fix)


@made_once(_RECENT)
def _negative(parameters: Mapping[tirx.Var, tirx.Buffer]) -> list[str]:
    return [
        f"parameter {buffer.name!r} has the shape {shown([int_or(size, str(size)) for size in buffer.shape])}"
        for buffer in parameters.values()
        if any(int_or(size, 0) < 0 for size in buffer.shape)
    ]


def of_jit(func: Any, sizes: Mapping[str, Any] | None) -> Any:
    """The PrimFunc of a @tilelang.jit function for these sizes; anything else as it is. The refusal names all the sizes
    that are missing, unknown, or given to what has its sizes already."""
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


class _OursAlone(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """TileLang logs the source of a function that raises, on the way out: not where the error says all itself."""
        return not isinstance(sys.exc_info()[1], MeshTensorError)


def keep_quiet() -> None:
    """From now on, TileLang's tracer logs nothing about a MeshTensorError. What others raise it logs as before."""
    logger = logging.getLogger(Builder.__module__)
    if not any(isinstance(found, _OursAlone) for found in logger.filters):
        logger.addFilter(_OursAlone())


def at_line(helper: Callable[..., Any]) -> Callable[..., Any]:
    """The helper; what it raises while a kernel is traced names the kernel's file and line."""

    @functools.wraps(helper)
    def located(*args: Any, **kwargs: Any) -> Any:
        try:
            return helper(*args, **kwargs)
        except MeshTensorError as error:
            builder = Builder.current()
            file, line = getattr(builder, "current_file", ""), getattr(builder, "current_line", 0)
            if not file or not line:
                raise
            raise MeshTensorError(f"{error}\n  line: {file}:{line}") from None

    return located


def block_at(buffer: tirx.Buffer, annotation: BufferAnnotation, coordinate: Any, what: str) -> tirx.BufferRegion:
    """The block of `buffer` at a coordinate, which `what` names."""
    block_shape = annotation.block_shape
    place = [constant(at) for at in (coordinate if _is_sequence(coordinate) else (coordinate,))]
    where = f"mesh_tensor_copy, buffer {buffer.name!r}"
    if block_shape is None:
        refuse(f"`{what}` is given, but the `block_shape` is None", where=where, fix="annotate a `block_shape`")
    if len(place) != len(block_shape):
        refuse(
            f"`{what}` {shown(tuple(place))} has {len(place)} coordinates, but the buffer has {len(block_shape)} dims",
            where=where,
            fix=f"give one block coordinate per dim (block_shape is {block_shape})",
        )
    for index, (size, dim) in enumerate(zip(block_shape, buffer.shape, strict=True)):
        _check_coordinate(place[index], constant(size), constant(dim), f"`{what}`, dim {index}", where)
    ranges = [ir.Range.from_min_extent(at * size, size) for at, size in zip(place, block_shape, strict=True)]
    return tirx.BufferRegion(buffer, ranges)


def own_block(buffer: Any, annotation: BufferAnnotation | None, other: Any) -> Any:
    """The block that the annotation's `program_id` is the coordinate of, where a copy names none; the buffer itself
    where it has the shape of the other side, or where nothing says which block is meant."""
    if annotation is None or annotation.block_shape is None or not _is_sequence(annotation.program_id):
        return buffer
    extents = _extents(other)
    if extents is None or len(annotation.program_id) != len(buffer.shape) or _alike(_extents(buffer), extents):
        return buffer
    return block_at(buffer, annotation, annotation.program_id, "program_id")


def check_extents(src: Any, dst: Any) -> None:
    """Where both sides' extents are known, those other than 1 pair up in order: T.copy doesn't check that."""
    found = [_extents(side) for side in (src, dst)]
    known = [None if extents is None or not all(map(is_int, extents)) else extents for extents in found]
    if None in known or known[0] == known[1]:
        return
    names = [(side.buffer if isinstance(side, tirx.BufferRegion) else side).name for side in (src, dst)]
    refuse(
        f"can't copy {known[0]} elements of {names[0]!r} to {known[1]} elements of {names[1]!r}",
        where="mesh_tensor_copy (dims of extent 1 are left out)",
        fix="give `src_coord` or `dst_coord` where a block is meant, or a coordinate as `program_id`; "
        "with a `block_shape` like the other side's shape",
    )


def constant(value: Any) -> Any:
    """An int where the value is one, whatever its type; other values as they are."""
    if isinstance(value, tirx.IntImm):
        return value.value
    return int(value) if is_int(value) else value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple, tvm_ffi.Array))


def _check_coordinate(at: Any, size: Any, dim: Any, what: str, where: str) -> None:
    """A coordinate is an int or an expression, and names a block that exists where that is known."""
    if not is_int(at) and not isinstance(at, tirx.PrimExpr):
        refuse(f"{what}: {shown(at)} is no int or expression", where=where, fix="give the index of a block")
    if is_int(at) and is_int(size) and is_int(dim):
        blocks = max(1, ceildiv(dim, size))
        if not 0 <= at < blocks:
            refuse(f"{what}: there is no block {at}", where=where, fix=f"blocks of {size} go from 0 to {blocks - 1}")


def _extents(side: Any) -> list[Any] | None:
    """The extents of one side of a copy but for those of 1; None where the other side's count."""
    if isinstance(side, tirx.Buffer):
        extents = [constant(dim) for dim in side.shape]
    elif isinstance(side, tirx.BufferRegion):
        extents = [constant(dim.extent) for dim in side.region]
    else:
        return None
    return [extent for extent in extents if not is_int(extent) or extent != 1]


def _alike(ours: list[Any] | None, theirs: list[Any]) -> bool:
    if ours is None or len(ours) != len(theirs):
        return False
    prove = Prover().can_prove_equal
    return all(a == b if is_int(a) and is_int(b) else prove(a, b) for a, b in zip(ours, theirs, strict=True))
