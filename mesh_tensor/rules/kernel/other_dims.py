"""The same memory with other dims: accesses of parameters whose dims are taken apart, or put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.memory import row_strides
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import with_indices

#: From a buffer, where a region of it starts, and how long it is per dim, to these two in other dims; None if it has no
#: form there.
Place = Callable[[tirx.Buffer, Sequence, Sequence], tuple[list, list] | None]
_POINTERS = ("tl.access_ptr", "tirx.tvm_access_ptr")


def with_other_dims(body: tirx.Stmt, buffers: Mapping[tirx.Buffer, tirx.Buffer], place: Place) -> tirx.Stmt | None:
    """The statement on other buffers over the same memory; None if some access has no form in their dims."""
    problems: list[object] = []  # an exception would not get through TVM's visitor as itself

    def placed(buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list]:
        found = place(buffer, mins, extents)
        if found is None:
            problems.append(buffer)
            return [*mins], [*extents]
        return found

    def region(call: tirx.Call) -> tirx.Call | None:
        name = op_name(call)
        if name in _POINTERS:
            problems.extend(var for var in nodes(call, tirx.Var) if var in mentioned)
        if name != "tl.region" or call.args[0].buffer not in buffers:
            return None
        load, mode, *extents = call.args
        mins, lengths = placed(load.buffer, load.indices, extents)
        if problems:
            return None
        return tirx.call_intrin("handle", call.op, tirx.BufferLoad(buffers[load.buffer], mins), mode, *lengths)

    def access(node: tirx.BufferLoad | tirx.BufferStore) -> object:
        if node.buffer not in buffers:
            return None
        indices, _ = placed(node.buffer, node.indices, [1] * len(node.indices))
        return None if problems else with_indices(node, indices, buffers[node.buffer])

    mentioned = {buffer.data for buffer in buffers}
    body = tirx.stmt_functor.ir_transform(body, None, region, ["tirx.Call"])
    body = tirx.stmt_functor.ir_transform(body, None, access, ["tirx.BufferLoad", "tirx.BufferStore"])
    return None if problems else body


def reshaped(buffer: tirx.Buffer, shape: Sequence) -> tirx.Buffer:
    """The buffer with another shape; same data variable, name, dtype and scope; rows stay contiguous."""
    return tirx.decl_buffer(
        list(shape),
        buffer.dtype,
        buffer.name,
        data=buffer.data,
        strides=row_strides(shape) if len(buffer.strides) else None,
        scope=buffer.scope(),
        elem_offset=buffer.elem_offset,
    )
