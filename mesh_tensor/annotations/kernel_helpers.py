"""The helpers for the body of a kernel: state how its buffers lie on a mesh, and ask what one device holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tilelang.language as T
from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.frame import PrimFuncFrame

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.tir.tile_position import axis_index, tile_extent, tile_offset

from .annotate import TILES_ATTR, attributes
from .annotation import HOW_TO_ANNOTATE, BufferAnnotation, check, init_mesh_tensor_info, metadata_to_attr
from .kernel_source import at_line, block_at, check_extents, constant, keep_quiet, own_block

_DEFAULT_MESH = Mesh({"x": 4, "y": 4})

keep_quiet()


def mesh_tensor_functions(mesh_shape: Mapping[str, int] | Mesh = _DEFAULT_MESH) -> dict[str, Callable[..., Any]]:
    """Helpers for the body of a kernel over a whole tensor that lies on a mesh: a dict with

    - `annotate_mesh_tensor_info({buffer: {"block_shape", "program_id", "sharding"[, "replicate", "partial"]}, ...})`
    - `init_mesh_tensor_info(sharding, block_shape, program_id)`: the metadata of one buffer, with all that is required
    - `get_tile_shape(buffer)`: the shape of what one device holds of an annotated buffer
    - `get_tile_offset(buffer)`: per dim, the global index of the first element of this device's tile
    - `get_tile_extent(buffer)`: per dim, how many elements of this device's tile are valid
    - `mesh_axis_index(axis)`: this device's coordinate on an axis of the mesh
    - `mesh_tensor_copy(src, dst, *, src_coord=None, dst_coord=None)`: a `T.copy` of the blocks at these coordinates

    which share what the first one stored, per buffer.

    Args:
        mesh_shape: the mesh, or a dict from the names of its axes to their sizes.

    Raises:
        MeshTensorError: here, the mesh is none; from each of the helpers, what is wrong in its call, and in which line
            of the kernel. It is a ValueError, too.

    >>> sorted(mesh_tensor_functions({"x": 2}))[1:5]
    ['get_tile_extent', 'get_tile_offset', 'get_tile_shape', 'init_mesh_tensor_info']
    """
    helpers = _Helpers(Mesh(mesh_shape))
    functions: dict[str, Callable[..., Any]] = {
        "annotate_mesh_tensor_info": helpers.annotate_mesh_tensor_info,
        "get_tile_shape": helpers.get_tile_shape,
        "get_tile_offset": helpers.get_tile_offset,
        "get_tile_extent": helpers.get_tile_extent,
        "mesh_axis_index": helpers.mesh_axis_index,
        "mesh_tensor_copy": helpers.mesh_tensor_copy,
        "init_mesh_tensor_info": init_mesh_tensor_info,
    }
    return {name: at_line(function) for name, function in functions.items()}


class _Helpers:
    """The helpers and what they share: what is stated about each buffer, by its data variable."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._annotations: dict[tirx.Var, BufferAnnotation] = {}
        self._buffers: dict[tirx.Var, tirx.Buffer] = {}
        self._asked: dict[tirx.Var, tuple[Any, ...]] = {}
        self._asked_inside = self._asked_outside = False

    def annotate_mesh_tensor_info(self, mesh_tensor_info: Mapping[tirx.Buffer, Mapping[str, Any]]) -> Any:
        """State how buffers lie on the mesh. Call it once, before `T.Kernel`, with all the annotated parameters: it
        attaches copies of the metadata to the kernel. (Outside of a kernel it returns the attributes instead.)"""
        if not isinstance(mesh_tensor_info, Mapping):
            refuse(
                f"the annotation is {shown(mesh_tensor_info)}, which is not a dict from buffers", fix=HOW_TO_ANNOTATE
            )
        annotations, info, problems = {}, {}, []
        for buffer, metadata in mesh_tensor_info.items():
            if not isinstance(buffer, tirx.Buffer):
                problems.append(f"{shown(buffer)} is annotated, but it is no buffer")
                continue
            if _is_view(buffer, _parameter_at(buffer.data)):
                problems.append(_why_no_view(buffer, _parameter_at(buffer.data)))
                continue
            annotation, wrong = check(self._mesh, len(buffer.shape), metadata)
            problems += [f"buffer {buffer.name!r}: {problem}" for problem in wrong]
            if annotation is not None:
                annotations[buffer.data] = annotation
                self._buffers[buffer.data] = buffer
                info[buffer.data] = metadata_to_attr(metadata, annotation)
        if problems:
            refuse(problems, where=str(self._mesh), fix=HOW_TO_ANNOTATE)
        attached = _attach(self._mesh, info)
        self._annotations.update(annotations)
        if not IRBuilder.is_in_scope():
            return {**attached, TILES_ATTR: {}}
        self._asked_inside, self._asked = False, {}
        IRBuilder.current().frames[-1].add_callback(self._mark)
        return attached

    def get_tile_shape(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        """The shape of what one device holds of `buffer`: ceildiv(dim, axis sizes), symbolic where the dim is.

        A kernel that asks may be written over tiles: it gets the `mesh_tensor_tiles` attribute, at which `lower` looks
        at its loops."""
        annotation = self._annotation(buffer)
        self._ask()
        shape = annotation.sharding.tile_shape([constant(dim) for dim in buffer.shape])
        self._asked[buffer.data] = shape
        return shape

    def get_tile_offset(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        """Per dim, the global index of the first element of this device's tile of `buffer`: 0 where no axis splits the
        dim, else an expression for the body of a kernel over tiles."""
        return tuple(
            tile_offset(buffer.name, dim, tile, buffer.shape[dim].dtype) if is_split else 0
            for dim, (tile, is_split) in enumerate(self._tiles(buffer))
        )

    def get_tile_extent(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        """Per dim, how many elements of this device's tile of `buffer` are valid (the last tiles may be short, or
        empty): the dim's size where no axis splits it, else an expression for the body of a kernel over tiles."""
        return tuple(
            tile_extent(buffer.name, dim, tile, buffer.shape[dim].dtype) if is_split else tile
            for dim, (tile, is_split) in enumerate(self._tiles(buffer))
        )

    def mesh_axis_index(self, axis: str) -> tirx.PrimExpr:
        """This device's coordinate on `axis`, an expression for the body of a kernel over tiles."""
        self._mesh.check_axes((axis,))
        self._ask()
        return axis_index(axis)

    def _tiles(self, buffer: tirx.Buffer) -> list[tuple[Any, bool]]:
        """Per dim of the buffer, the size of a tile, and whether devices hold different ones."""
        layout = self._annotation(buffer).sharding
        shape = self.get_tile_shape(buffer)
        return [(tile, layout.num_shards(dim) > 1) for dim, tile in enumerate(shape)]

    def _ask(self) -> None:
        if IRBuilder.is_in_scope():
            self._asked_inside = True
        else:
            self._asked_outside = True

    def _mark(self) -> None:
        """At the end of an annotated kernel: say that it may be written over tiles, and over which, if a helper was
        asked for tiles in it, or before any kernel."""
        if self._asked_inside or self._asked_outside:
            T.func_attr({TILES_ATTR: self._asked})

    def mesh_tensor_copy(self, src: Any, dst: Any, *, src_coord: Any = None, dst_coord: Any = None) -> Any:
        """`T.copy` from `src` to `dst`; where a coordinate is given, from or to that block of the buffer. Where none is
        and the other side has another shape, the block is the one that the buffer's `program_id` is a coordinate of."""
        self._check_sides(src, dst, src_coord, dst_coord)
        source, target = self._block(src, src_coord, "src_coord"), self._block(dst, dst_coord, "dst_coord")
        if src_coord is None:
            source = own_block(src, self._stated(src), target)
        if dst_coord is None:
            target = own_block(dst, self._stated(dst), source)
        check_extents(source, target)
        copy = T.copy(source, target)
        if not IRBuilder.is_in_scope() or not isinstance(copy, tirx.PrimExpr):
            return copy
        T.evaluate(copy)
        return None

    def _check_sides(self, src: Any, dst: Any, src_coord: Any, dst_coord: Any) -> None:
        """Refuse the coordinate of a block for the side that has no blocks, where the other one has."""
        for one, other, given, missing, argument, meant in (
            (src, dst, src_coord, dst_coord, "src_coord", "dst_coord"),
            (dst, src, dst_coord, src_coord, "dst_coord", "src_coord"),
        ):
            is_plain = isinstance(one, tirx.Buffer) and one.data not in self._annotations
            if given is not None and missing is None and is_plain and self._stated(other) is not None:
                refuse(
                    f"`{argument}` is for {one.name!r}, which is not annotated; {other.name!r} is",
                    where="mesh_tensor_copy",
                    fix=f"give `{meant}`, the block of {other.name!r}; or annotate {one.name!r}",
                )

    def _block(self, buffer: Any, coordinate: Any, argument: str) -> Any:
        return buffer if coordinate is None else block_at(buffer, self._annotation(buffer), coordinate, argument)

    def _stated(self, buffer: Any) -> BufferAnnotation | None:
        if not isinstance(buffer, tirx.Buffer) or _is_view(buffer, self._buffers.get(buffer.data)):
            return None
        return self._annotations.get(buffer.data)

    def _annotation(self, buffer: Any) -> BufferAnnotation:
        if not isinstance(buffer, tirx.Buffer):
            refuse(
                f"{shown(buffer)} is no buffer", fix="give a whole buffer that annotate_mesh_tensor_info has annotated"
            )
        found = self._annotations.get(buffer.data)
        if found is None:
            refuse(
                f"buffer {buffer.name!r} has no mesh metadata",
                where=f"the helpers of {self._mesh}",
                fix="annotate it with the annotate_mesh_tensor_info of the same mesh_tensor_functions(...), before "
                f"this call: {HOW_TO_ANNOTATE}",
            )
        if _is_view(buffer, self._buffers[buffer.data]):
            refuse(
                _why_no_view(buffer, self._buffers[buffer.data]),
                where=f"the helpers of {self._mesh}",
                fix="give the parameter itself",
            )
        return found


def _attach(mesh: Mesh, info: dict[tirx.Var, dict[str, Any]]) -> Any:
    attrs = attributes(mesh, info)
    if not IRBuilder.is_in_scope():
        return attrs
    try:
        return T.func_attr(attrs)
    except ValueError as error:
        refuse(
            "the annotation can't be attached to the kernel",
            where=str(mesh),
            why=str(error),
            fix="call annotate_mesh_tensor_info once per kernel, before T.Kernel, with all the buffers it annotates",
        )


def _parameter_at(data: tirx.Var) -> tirx.Buffer | None:
    """The parameter of the kernel around that has this memory."""
    frames = IRBuilder.current().frames if IRBuilder.is_in_scope() else ()
    found = (frame.buffer_map.values() for frame in frames if isinstance(frame, PrimFuncFrame))
    return next((buffer for buffers in found for buffer in buffers if buffer.data.same_as(data)), None)


def _is_view(buffer: tirx.Buffer, parameter: tirx.Buffer | None) -> bool:
    """Whether the buffer has another shape or dtype than the parameter whose memory it is."""
    if parameter is None or buffer.same_as(parameter):
        return False
    return buffer.dtype != parameter.dtype or not ir.structural_equal(list(buffer.shape), list(parameter.shape))


def _why_no_view(buffer: tirx.Buffer, parameter: tirx.Buffer | None) -> str:
    name = "a parameter" if parameter is None else repr(str(parameter.name))
    return f"buffer {str(buffer.name)!r} is a view of {name}: what lies on the mesh is the parameter, dim by dim"
