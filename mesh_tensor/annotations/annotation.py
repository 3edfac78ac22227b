"""What is stated about one buffer: checked here, whichever of the frontend's doors it came through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import tvm_ffi
from tvm import tirx

from mesh_tensor.base.errors import MeshTensorError, did_you_mean, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Partial, Placement, Shard, collect, is_list, parse_text, state
from mesh_tensor.base.sharding import Sharding

REQUIRED_KEYS = ("block_shape", "program_id", "sharding")
KEYS = (*REQUIRED_KEYS, "replicate", "partial")
HOW_TO_ANNOTATE = (
    'annotate a buffer with {"block_shape": (a size per dim), "program_id": an int, coordinate, expression or None, '
    '"sharding": {axis: a dim, or None to replicate}}, optionally "replicate": (axis, ...), "partial": {axis: op}; '
    "each axis once; init_mesh_tensor_info(sharding=...) fills in what isn't given"
)


@dataclass(frozen=True)
class BufferAnnotation:
    """How a buffer lies on the mesh, and what its kernel said about its blocks (None: it said nothing)."""

    sharding: Sharding
    block_shape: tuple[Any, ...] | None = None
    program_id: Any = None


def check(mesh: Mesh, ndim: int, metadata: Any) -> tuple[BufferAnnotation | None, list[str]]:
    """The annotation that `metadata` states for a buffer of `ndim` dims; or None, and all that is wrong with it."""
    if not isinstance(metadata, Mapping):
        return None, [f"the metadata is {shown(metadata)}, which is not a dict"]
    problems = _check_keys(metadata)
    block_shape, program_id = metadata.get("block_shape"), metadata.get("program_id")
    problems += _check_block_shape(block_shape, ndim)
    problems += _check_program_id(program_id, ndim)
    by_axis, wrong = _placements(mesh, ndim, metadata)
    problems += wrong
    if problems:
        return None, problems
    blocks = None if block_shape is None else tuple(int(size) if is_int(size) else size for size in block_shape)
    if isinstance(program_id, (list, tvm_ffi.Array)):
        program_id = tuple(program_id)
    return BufferAnnotation(Sharding.of(mesh, ndim, by_axis), blocks, program_id), []


def complete(mesh: Mesh, stated: Any) -> dict[str, Any]:
    """The metadata dict of what `annotate` accepts for a buffer: a metadata dict that may leave keys out, or only the
    sharding."""
    given = stated if _is_metadata(mesh, stated) else {"sharding": stated}
    return init_mesh_tensor_info(sharding={}) | dict(given)


def init_mesh_tensor_info(
    sharding: Any = None, block_shape: Sequence[Any] | None = None, program_id: Any = None, **optional: Any
) -> dict[str, Any]:
    """The metadata of a buffer for `annotate_mesh_tensor_info`, with all of its required keys.

    Args:
        sharding: how the buffer lies on the mesh: `{"x": 0, "y": 1}`, one placement per axis (`[Shard(0), 1, None]`: a
            placement, a dim, or None to replicate), a text or a Sharding. Left out: every device holds all of it.
        block_shape: what one program handles of it, a size per dim; `mesh_tensor_copy` takes its blocks by that.
        program_id: the block that copies are about which name none, as a coordinate per dim.
        optional: `replicate` and `partial`, where they are stated.

    >>> init_mesh_tensor_info({"x": 0}, (16, 16))
    {'sharding': {'x': 0}, 'block_shape': (16, 16), 'program_id': None}
    """
    if problems := _unknown_keys(optional):
        refuse(problems, where="init_mesh_tensor_info", fix=f"give what metadata has: {', '.join(KEYS)}")
    stated = {} if sharding is None else sharding
    if not isinstance(stated, (Mapping, str, Sharding)) and not is_list(stated):
        refuse(
            f"`sharding` is {shown(sharding)}, which is not a dict, list, text or Sharding",
            where="init_mesh_tensor_info",
            fix='say how the buffer lies on the mesh, such as {"x": 0}: axis x splits dim 0',
        )
    return {"sharding": stated, "block_shape": block_shape, "program_id": program_id, **optional}


def _is_metadata(mesh: Mesh, stated: Any) -> bool:
    """Whether a dict is metadata, not a sharding: by its keys, misspelt ones too where they are no axes."""
    if not isinstance(stated, Mapping):
        return False
    keys = [key for key in stated if key not in mesh]
    named = [key for key in keys if isinstance(key, str)]
    misspelt = [key for key in named if not is_int(stated[key]) and did_you_mean(key, KEYS)]
    return any(key in KEYS for key in keys) or len(misspelt) == len(stated) > 0


def metadata_to_attr(metadata: Mapping[str, Any], annotation: BufferAnnotation) -> dict[str, Any]:
    """A deep copy of checked metadata as an attribute, with the sharding as a dict, whatever its form was."""
    sharding = metadata["sharding"]
    plain = isinstance(sharding, Mapping) and all(isinstance(axis, str) for axis in sharding)
    if plain and all(dim is None or is_int(dim) for dim in sharding.values()):
        return {key: to_attr(value) for key, value in metadata.items()}
    stated = annotation.sharding  # a dict has no order of axes: the text has
    whole: Any = stated.as_dict() if stated.is_in_mesh_order else Sharding(stated.mesh, stated.ndim, stated.dims).text()
    canonical = {"sharding": whole, "partial": dict(stated.partial)}
    return {key: to_attr(value) for key, value in {**metadata, **canonical}.items()}


def to_attr(value: Any) -> Any:
    """A deep copy that TVM can hold: containers are copied, TVM's objects (immutable) stay the same objects, so that
    variables stay the same variables."""
    if isinstance(value, Mapping):
        return {key: to_attr(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, tvm_ffi.Array)):
        return [to_attr(item) for item in value]
    return int(value) if is_int(value) else value


def from_attr(value: Any) -> Any:
    """The Python value of an attribute: containers and constants of TVM become Python's."""
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {from_attr(key): from_attr(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return tuple(from_attr(item) for item in value)
    if isinstance(value, (tirx.IntImm, tirx.StringImm)):
        return value.value
    return value


def _check_keys(metadata: Mapping[str, Any]) -> list[str]:
    """What is missing, and what nothing would read. A key that begins with an underscore is its author's own."""
    missing = [f"`{key}`" for key in REQUIRED_KEYS if key not in metadata]
    own = [key for key in metadata if isinstance(key, str) and key.startswith("_")]
    unknown = _unknown_keys(key for key in metadata if key not in own)
    return [f"missing {', '.join(missing)}", *unknown] if missing else unknown


def _unknown_keys(keys: Iterable[Any]) -> list[str]:
    known = f"(known: {listing(KEYS)})"
    return [f"unknown key {shown(key)} {known}{did_you_mean(key, KEYS)}" for key in keys if key not in KEYS]


def _check_block_shape(block_shape: Any, ndim: int) -> list[str]:
    if block_shape is None:
        return []
    if isinstance(block_shape, str) or not isinstance(block_shape, (Sequence, tvm_ffi.Array)):
        return [f"`block_shape` is {shown(block_shape)}, which is no sequence of sizes"]
    if len(block_shape) != ndim:
        return [f"`block_shape` {tuple(block_shape)} has {len(block_shape)} sizes, but the buffer has {ndim} dims"]
    bad = [size for size in block_shape if not _is_size(size, 1)]
    return [f"`block_shape` has the size {shown(size)}, which is no int of at least 1" for size in bad]


def _check_program_id(value: Any, ndim: int) -> list[str]:
    is_coordinate = isinstance(value, (list, tuple, tvm_ffi.Array))
    indices = list(value) if is_coordinate else [value]
    if value is None or all(_is_size(index, 0) for index in indices):
        if is_coordinate and len(indices) != ndim:
            found = f"{len(indices)} {'index' if len(indices) == 1 else 'indices'}"
            return [f"`program_id` {shown(tuple(indices))} has {found}, but the buffer has {ndim} dims"]
        return []
    if all(_is_size(index, float("-inf")) for index in indices):
        negative = next(index for index in indices if not _is_size(index, 0))
        return [f"`program_id` is {shown(value)}, which has the index {shown(negative)}: indices start at 0"]
    return [f"`program_id` is {shown(value)}, which is no int, coordinate, expression or None"]


def is_int(value: Any) -> bool:
    """Whether `value` is an int of Python's or numpy's, and no bool."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_size(value: Any, at_least: float) -> bool:
    value = value.value if isinstance(value, tirx.IntImm) else value
    return value >= at_least if is_int(value) else isinstance(value, tirx.PrimExpr)


def _placements(mesh: Mesh, ndim: int, metadata: Mapping[str, Any]) -> tuple[dict[str, Placement], list[str]]:
    sharding = metadata.get("sharding", {})
    implied: dict[str, str] = {}
    try:
        if isinstance(sharding, Sharding):
            sharding, implied = _of_sharding(mesh, ndim, sharding)
        elif isinstance(sharding, str):
            sharding, implied = parse_text(mesh, sharding)
    except MeshTensorError as error:
        return {}, [str(error)]
    by_axis, problems = state(mesh, ndim, sharding, metadata.get("replicate"), metadata.get("partial"))
    stated = [*by_axis.items(), *((axis, Partial(op)) for axis, op in implied.items())]
    by_axis, wrong = collect(mesh, ndim, stated)
    return by_axis, problems + wrong


def _of_sharding(mesh: Mesh, ndim: int, sharding: Sharding) -> tuple[dict[str, Placement], dict[str, str]]:
    if sharding.mesh != mesh:
        refuse(f"the sharding '{sharding}' is for {sharding.mesh}, not {mesh}")
    if sharding.ndim != ndim:
        refuse(f"the sharding '{sharding}' is for {sharding.ndim} dims, but the buffer has {ndim}")
    placements = sharding.placements().items()
    split: dict[str, Placement] = {axis: p for axis, p in placements if isinstance(p, Shard)}
    return split, dict(sharding.partial)
