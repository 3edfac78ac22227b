"""Which buffers of a kernel are the same memory.

`T.reshape`, `T.view` and `T.Tensor(shape, dtype, buffer.data)` make *views*: buffers over the memory of a parameter or
of an on-chip buffer, its *owner*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm import DataType, tirx

from mesh_tensor.base.errors import refuse

from .linear import loop_ranges
from .nodes import function_name, nodes
from .prover import Prover

_MOST_ELEMENTS = 2**31 - 1
_NAMING = (tirx.BufferLoad, tirx.BufferStore, tirx.DeclBuffer, tirx.AllocBuffer, tirx.SBlock, tirx.Var)


@dataclass(eq=False)
class Memory:
    """A parameter's memory or an allocated one. `buffers`: those that the kernel's body names, the owner among them if
    it is used itself."""

    owner: tirx.Buffer
    is_param: bool
    buffers: list[tirx.Buffer] = field(default_factory=list)

    @property
    def views(self) -> list[tirx.Buffer]:
        """The buffers that are not the owner itself."""
        return [buffer for buffer in self.buffers if not buffer.same_as(self.owner)]


def memories(func: tirx.PrimFunc) -> dict[tirx.Var, Memory]:
    """The memories of a kernel by their data variables. Refused where a buffer lies in no memory that is known here
    (behind a pointer, or a part of another buffer by `match_buffer`), or a view can't be its owner's memory read row by
    row; the message names them all."""
    found, facts = find_memories(func)
    if facts:
        name = function_name(func)
        refuse(
            facts,
            where=f"kernel {name!r}",
            why="only parameters, buffers that the kernel allocates, and row-major views of them are understood",
            fix="pass what a pointer leads to as a T.Tensor parameter; index the buffer itself instead of such a view",
        )
    return found


def find_memories(func: tirx.PrimFunc) -> tuple[dict[tirx.Var, Memory], list[str]]:
    """The memories by their data variables, and what is wrong with the buffers that are none of theirs."""
    found = {buffer.data: Memory(buffer, True) for buffer in func.buffer_map.values()}
    facts = ["several parameters are one memory"] if len(found) < len(func.buffer_map) else []
    used = _Uses(func)
    for buffer in used.allocated:
        found.setdefault(buffer.data, Memory(buffer, False))
    for buffer in used.matched:
        facts.append(f"buffer {named(buffer)} is a part of another buffer (match_buffer)")
        found.setdefault(buffer.data, Memory(buffer, False))
    for buffer in used.named:
        memory = found.get(buffer.data)
        if memory is None:
            facts.append(f"buffer {named(buffer)} lies behind a pointer, in no memory of the kernel's own")
            continue
        memory.buffers.append(buffer)
        problem = None if buffer.same_as(memory.owner) else _why_no_view(buffer, memory.owner)
        if problem:
            facts.append(f"buffer {named(buffer)} is a view of {memory.owner.name!r}: {problem}")
    facts += [
        f"the address of parameter {memory.owner.name!r} is used by itself (`{memory.owner.name}.data`)"
        for data, memory in found.items()
        if memory.is_param and data in used.pointers
    ]
    return found, facts


def named(buffer: tirx.Buffer) -> str:
    """What a message calls a buffer, with the line where it is made if that is known."""
    shape = ", ".join(str(size) for size in buffer.shape)
    span = getattr(buffer, "span", None)
    line = f", {span.source_name.name}:{span.line}" if span is not None else ""
    return f"{buffer.name!r} ({shape}) {buffer.dtype}{line}" if buffer.name else f"({shape}) {buffer.dtype}{line}"


def strides_of(buffer: tirx.Buffer) -> list[tirx.PrimExpr]:
    """The strides of a buffer; of one that says nothing, those of contiguous rows."""
    return list(buffer.strides) if len(buffer.strides) else row_strides(buffer.shape)


def row_strides(shape: Sequence) -> list[tirx.PrimExpr]:
    """The strides of contiguous rows."""
    strides: list[tirx.PrimExpr] = []
    step: tirx.PrimExpr = tirx.IntImm("int32", 1)
    for size in reversed(list(shape)):
        strides.insert(0, step)
        step = step * size
    return strides


def is_compact(buffer: tirx.Buffer, analyzer: Prover) -> bool:
    """Whether the buffer's rows lie one after the other without gaps."""
    if not len(buffer.strides):
        return True
    step: tirx.PrimExpr = tirx.IntImm("int32", 1)
    for size, stride in reversed(list(zip(buffer.shape, buffer.strides, strict=True))):
        if not _is_step(stride, step, analyzer) and not analyzer.can_prove_equal(size, 1):
            return False
        step = step * size
    return True


def _is_step(stride: tirx.PrimExpr, step: tirx.PrimExpr, analyzer: Prover) -> bool:
    if isinstance(stride, tirx.IntImm) and isinstance(step, tirx.IntImm):
        return int(stride) == int(step)
    return tirx.analysis.expr_deep_equal(stride, step) or analyzer.can_prove_equal(stride, step)


def elements(buffer: tirx.Buffer) -> tirx.PrimExpr:
    """How many elements a buffer has."""
    total: tirx.PrimExpr = tirx.IntImm("int64", 1)
    for size in buffer.shape:
        total = total * tirx.Cast("int64", size) if size.dtype != "int64" else total * size
    return Prover().simplify(total)


def _why_no_view(view: tirx.Buffer, owner: tirx.Buffer) -> str | None:
    """Why the accesses to a view are none to its owner, element for element; None if they are."""
    analyzer = loop_ranges(tirx.Evaluate(0), (view, owner))
    if view.dtype != owner.dtype and not {_bits(view), _bits(owner)} <= {8, 16, 32, 64}:
        return f"it takes {owner.dtype} for {view.dtype}"
    if view.elem_offset is not None and not analyzer.can_prove_equal(view.elem_offset, 0):
        return f"it starts at element {view.elem_offset}"
    if not is_compact(owner, analyzer):
        return f"the rows of {owner.name!r} have strides {list(owner.strides)}"
    reach, total = _reach(view, analyzer), elements(owner)
    if not analyzer.can_prove(reach * _bits(view) <= total * _bits(owner)):
        needed, there = _text(reach), _text(total)
        return f"it needs {needed} elements of {view.dtype}, which {there} of {owner.dtype} are not known to hold"
    if isinstance(total, tirx.IntImm) and int(total) > _MOST_ELEMENTS:
        return f"{_text(total)} elements are more than an index can count"
    return None


def _reach(view: tirx.Buffer, analyzer: Prover) -> tirx.PrimExpr:
    """One more than the last element of its memory that a view names."""
    if is_compact(view, analyzer):
        return elements(view)
    last: tirx.PrimExpr = tirx.IntImm("int64", 1)
    for size, stride in zip(view.shape, strides_of(view), strict=True):
        last = last + tirx.Cast("int64", size - 1) * tirx.Cast("int64", stride)
    return analyzer.simplify(last)


def _text(size: tirx.PrimExpr) -> str:
    return str(int(size)) if isinstance(size, tirx.IntImm) else str(size)


def has_equal_bits(a: tirx.Buffer, b: tirx.Buffer) -> bool:
    """Whether an element of one buffer is an element of the other, in the same dtype or in another one."""
    return bool(a.dtype == b.dtype) or _bits(a) == _bits(b)


def _bits(buffer: tirx.Buffer) -> int:
    """The size of one element; of a bool 1."""
    dtype = DataType(buffer.dtype)
    return 1 if str(buffer.dtype) == "bool" else dtype.bits * dtype.lanes


class _Uses:
    """The buffers in a function: allocated ones, parts of others, all that its body names; and the variables of
    pointers that are used by themselves."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.allocated: list[tirx.Buffer] = []
        self.matched: list[tirx.Buffer] = []
        self._named: dict[tirx.Buffer, None] = {}
        self.pointers: set[tirx.Var] = set()
        for node in nodes(func.body, *_NAMING):
            self._visit(node)

    @property
    def named(self) -> list[tirx.Buffer]:
        return list(self._named)

    def _visit(self, node: object) -> None:
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore, tirx.DeclBuffer)):
            self._named.setdefault(node.buffer)
        elif isinstance(node, tirx.AllocBuffer):
            self.allocated.append(node.buffer)
        elif isinstance(node, tirx.SBlock):
            self.allocated.extend(node.alloc_buffers)
            self.matched.extend(match.buffer for match in node.match_buffers)
        elif isinstance(node, tirx.Var) and node.dtype == "handle":
            self.pointers.add(node)
