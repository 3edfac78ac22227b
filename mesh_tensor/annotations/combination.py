"""What the author of a kernel states of a state that a loop carries: how those of two parts of the loop, one after the
other, make that of both.

The block of a kernel of which that is stated has an annotation per state, `mesh_tensor_combine:<names of its buffers>`:
as JSON, a PrimFunc of the state's buffers before and after, which stores into the former. `mesh_tensor_combine_tried`
says that what is stated was tried; nothing goes by what was not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from tilelang.language.eager.builder import Builder, Macro
from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.frame import SBlockFrame

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import block_like, buffer_like, over_elements, rewritten, sequence

from .kernel_source import at_line, keep_quiet

_PREFIX = "mesh_tensor_combine:"
_TRIED = "mesh_tensor_combine_tried"
_HOW = (
    "call mt.combine(state=(m, l), with_=function) in the kernel, after the state's buffers are allocated; the "
    "function takes the elements of two states, before and after, and returns those of both; or a T.macro takes the "
    "buffers of both, and stores into those of the former"
)

keep_quiet()


@dataclass(frozen=True, eq=False)
class Combination:
    """`func`, and what it is made of: `before` becomes the state of both parts; `own` is what the statements need
    beside."""

    func: tirx.PrimFunc
    names: tuple[str, ...]
    before: tuple[tirx.Buffer, ...]
    after: tuple[tirx.Buffer, ...]
    own: tuple[tirx.Buffer, ...]
    body: tirx.Stmt


@at_line
def combine(*, state: tirx.Buffer | Sequence[tirx.Buffer], with_: Callable[..., Any]) -> None:
    """State, in a kernel's body, how the states of two parts of a loop make the state of both.

    A loop over a dim may then be split though it carries more than mesh_tensor recognises: every device runs its part
    from the state that the kernel starts from, which has to be neutral, and the states are combined in order.

    Args:
        state: the buffers (or variables) on chip that the loop carries together.
        with_: a function of two states, `before` and `after`: tuples of elements, in the order of `state`, of buffers
            of one shape. It returns the elements of the state of both. Or a `T.macro` of two tuples of buffers, which
            stores the state of both into those of the former.

    `mt.compile` tries it: parts of the kernel's own loop are run on random data, and have to combine to what the loop
    makes of them at once, in any grouping, with the start as the neutral element.

    Raises:
        MeshTensorError: not in a kernel, no buffers on chip, or a function that doesn't fit them.

    >>> mt.combine(state=(count, mean, m2), with_=welford)  # in the kernel, after alloc_fragment
    """
    buffers = (state,) if isinstance(state, tirx.Buffer) else tuple(state)
    _check(buffers, with_)
    names = [str(buffer.name) for buffer in buffers]
    stated = _traced(buffers, with_) if isinstance(with_, Macro) else _of_elements(buffers, with_)
    if not isinstance(IRBuilder.current().frames[-1], SBlockFrame):
        refuse("it is called in a loop or under a condition", where="mt.combine", fix=_HOW)
    T.sblock_attr({_PREFIX + ",".join(names): ir.save_json(stated)})  # a function in an annotation can't be printed


def stated_combinations(func: tirx.PrimFunc) -> tuple[Combination, ...]:
    """What is stated in a function's kernels, tried or not."""
    return tuple(found for block in nodes(func.body, tirx.SBlock) for found in _read_all(block))


def tried_combinations(root: tirx.SBlock) -> tuple[Combination, ...]:
    """What is stated in a kernel's block and holds, as far as it was tried."""
    names = [str(name) for name in root.annotations.get(_TRIED, ())]
    return tuple(combination for combination in _read_all(root) if ",".join(combination.names) in names)


def with_tried(func: tirx.PrimFunc, tried: Collection[Combination]) -> tirx.PrimFunc:
    """The function, of which some of what is stated was tried."""
    names = sorted({",".join(combination.names) for combination in tried})

    def marked(block: tirx.SBlock) -> tirx.SBlock | None:
        if not any(is_stated(str(key)) for key in block.annotations):
            return None
        return block_like(block, block.body, block.alloc_buffers, annotations={**block.annotations, _TRIED: names})

    return rewritten(func, marked, tirx.SBlock)


def is_stated(annotation: str) -> bool:
    """Whether it is one of what `combine` leaves."""
    return annotation.startswith(_PREFIX) or annotation == _TRIED


def _check(buffers: Sequence[Any], with_: Any) -> None:
    problems = [f"{shown(buffer)} is no buffer" for buffer in buffers if not isinstance(buffer, tirx.Buffer)]
    known = [buffer for buffer in buffers if isinstance(buffer, tirx.Buffer)]
    problems += [f"{buffer.name!r} is not on chip" for buffer in known if buffer.scope() == "global"]
    problems += ["no buffer is given"] if not buffers else []
    names = [str(buffer.name) for buffer in known]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"several buffers are named {name!r}" for name in twice]
    problems += [] if callable(with_) else [f"with_ is {shown(with_)}, which is no function"]
    if not IRBuilder.is_in_scope() or Builder.current() is None:
        problems.append("it is called outside of a kernel")
    if problems:
        refuse(problems, where="mt.combine", fix=_HOW)


def _of_elements(buffers: Sequence[tirx.Buffer], with_: Callable[..., Any]) -> tirx.PrimFunc:
    first = buffers[0]
    if other := next((b for b in buffers if not ir.structural_equal(list(b.shape), list(first.shape))), None):
        refuse(
            f"{first.name!r} has the shape {list(first.shape)}, {other.name!r} {list(other.shape)}",
            where="mt.combine",
            why="a function of elements takes those of the same place in all of them",
            fix="give a T.macro, which takes the buffers",
        )
    before, after, made = ([buffer_like(b, suffix) for b in buffers] for suffix in ("before", "after", "both"))

    def of(group: Sequence[tirx.Buffer], at: Sequence[tirx.PrimExpr]) -> tuple[tirx.PrimExpr, ...]:
        return tuple(tirx.BufferLoad(buffer, list(at)) for buffer in group)

    def results(at: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        values = with_(of(before, at), of(after, at))
        values = values if isinstance(values, (tuple, list)) else (values,)
        if len(values) != len(buffers):
            names = listing([str(b.name) for b in buffers])
            refuse(
                f"with_ returns {len(values)} elements, the state has {len(buffers)}: {names}",
                where="mt.combine",
                fix="return one element per buffer, in their order",
            )
        stores = zip(made, values, strict=True)
        return sequence([tirx.BufferStore(b, _cast(v, b.dtype), list(at)) for b, v in stores])

    def kept(at: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        loads = zip(before, of(made, at), strict=True)
        return sequence([tirx.BufferStore(b, value, list(at)) for b, value in loads])

    return _function(before, after, made, sequence([over_elements(first, results), over_elements(first, kept)]))


def _cast(value: Any, dtype: str) -> tirx.PrimExpr:
    value = value if isinstance(value, tirx.PrimExpr) else tirx.const(value, dtype)
    return value if value.dtype == dtype else tirx.Cast(dtype, value)


def _traced(buffers: Sequence[tirx.Buffer], macro: Callable[..., Any]) -> tirx.PrimFunc:
    """The macro's statements: traced in a thread of its own, since TileLang traces one function per thread."""
    with ThreadPoolExecutor(1) as thread:
        func, before, after = thread.submit(_trace, buffers, macro).result()
    block = next(b for b in nodes(func.body, tirx.SBlock) if b.name_hint == "tilelang_root")
    given = [*before, *after]
    own = [b for b in block.alloc_buffers if not any(b.same_as(other) for other in given)]
    return _function(before, after, own, block.body)


def _trace(
    buffers: Sequence[tirx.Buffer], macro: Callable[..., Any]
) -> tuple[tirx.PrimFunc, list[tirx.Buffer], list[tirx.Buffer]]:
    builder = Builder()
    with builder.prim_func("combine"), T.Kernel(1, threads=128):
        before, after = (
            [T.sblock_alloc_buffer(list(b.shape), b.dtype, scope=b.scope()) for b in buffers]
            for _ in ("before", "after")
        )
        for group, suffix in ((before, "before"), (after, "after")):
            for made, buffer in zip(group, buffers, strict=True):
                IRBuilder.name(f"{buffer.name}_{suffix}", made)
        macro(tuple(before), tuple(after))
    return builder.ir_builder.get(), before, after


def _function(
    before: Sequence[tirx.Buffer], after: Sequence[tirx.Buffer], own: Sequence[tirx.Buffer], body: tirx.Stmt
) -> tirx.PrimFunc:
    handles = {tirx.Var(f"{b.name}_handle", "handle"): b for b in (*before, *after)}
    block = tirx.SBlock([], [], [], "tilelang_root", body, None, list(own), [], {})
    realized = tirx.SBlockRealize([], tirx.const(True, "bool"), block)
    return tirx.PrimFunc(list(handles), realized, None, handles)


def states_combinations(text: str) -> bool:
    """Whether a saved module has a kernel that states how states combine."""
    return _PREFIX in text


def _read_all(block: tirx.SBlock) -> tuple[Combination, ...]:
    stated = ((str(key), value) for key, value in block.annotations.items())
    kept = ((key[len(_PREFIX) :], text) for key, text in stated if key.startswith(_PREFIX))
    return tuple(_read(names.split(","), ir.load_json(str(text))) for names, text in kept)


def _read(names: Sequence[str], func: tirx.PrimFunc) -> Combination:
    buffers = [func.buffer_map[param] for param in func.params]
    block = func.body.block
    half = len(names)
    return Combination(
        func, tuple(names), tuple(buffers[:half]), tuple(buffers[half:]), tuple(block.alloc_buffers), block.body
    )
