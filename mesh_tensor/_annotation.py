"""What is stated about one buffer: checked here, whichever of the frontend's doors it came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import tvm_ffi
from tvm import tirx

from ._placement import Partial, Placement, collect, state
from ._sharding_text import parse_text
from .errors import MeshTensorError, refuse
from .mesh import Mesh
from .sharding import Sharding

REQUIRED_KEYS = ("block_shape", "program_id", "sharding")
KEYS = (*REQUIRED_KEYS, "replicate", "partial")
HOW_TO_ANNOTATE = (
    'annotate a buffer with {"block_shape": (a size per dim), "program_id": an int, coordinate, expression or None, '
    '"sharding": {axis: a dim, or None to replicate}}, optionally "replicate": (axis, ...), "partial": {axis: op}; '
    "each axis once"
)


@dataclass(frozen=True)
class Annotation:
    """How a buffer lies on the mesh, and what its kernel said about its blocks (None: it said nothing)."""

    sharding: Sharding
    block_shape: tuple[Any, ...] | None = None
    program_id: Any = None


def check(mesh: Mesh, ndim: int, metadata: Any) -> tuple[Annotation | None, list[str]]:
    """The annotation that `metadata` states for a buffer of `ndim` dims; or None, and all that is wrong with it."""
    if not isinstance(metadata, Mapping):
        return None, [f"the metadata is {metadata!r}, which is not a dict"]
    missing = [f"`{key}`" for key in REQUIRED_KEYS if key not in metadata]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    block_shape, program_id = metadata.get("block_shape"), metadata.get("program_id")
    problems += _check_block_shape(block_shape, ndim)
    if not _is_program_id(program_id):
        problems.append(f"`program_id` is {program_id!r}, which is no int, coordinate, expression or None")
    by_axis, wrong = _placements(mesh, ndim, metadata)
    problems += wrong
    if problems:
        return None, problems
    blocks = None if block_shape is None else tuple(int(size) if is_int(size) else size for size in block_shape)
    return Annotation(Sharding.of(mesh, ndim, by_axis), blocks, program_id), []


def complete(mesh: Mesh, stated: Any) -> dict[str, Any]:
    """The metadata dict of what `annotate` accepts for a buffer: a metadata dict that may leave keys out, or only the
    sharding."""
    is_metadata = isinstance(stated, Mapping) and any(key in stated and key not in mesh for key in KEYS)
    given = stated if is_metadata else {"sharding": stated}
    return {"block_shape": None, "program_id": None, "sharding": {}, **given}


def metadata_to_attr(metadata: Mapping[str, Any], annotation: Annotation) -> dict[str, Any]:
    """A deep copy of checked metadata as an attribute, with the sharding as a dict, whatever its form was."""
    copied = {key: to_attr(value) for key, value in metadata.items()}
    if not isinstance(metadata["sharding"], Mapping):
        copied["sharding"] = annotation.sharding.as_dict()
        copied["partial"] = dict(annotation.sharding.partial)
    return copied


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
    if isinstance(value, Mapping):
        return {from_attr(key): from_attr(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return tuple(from_attr(item) for item in value)
    if isinstance(value, (tirx.IntImm, tirx.StringImm)):
        return value.value
    return str(value) if isinstance(value, str) else value


def _check_block_shape(block_shape: Any, ndim: int) -> list[str]:
    if block_shape is None:
        return []
    if isinstance(block_shape, str) or not isinstance(block_shape, (Sequence, tvm_ffi.Array)):
        return [f"`block_shape` is {block_shape!r}, which is no sequence of sizes"]
    if len(block_shape) != ndim:
        return [f"`block_shape` {tuple(block_shape)} has {len(block_shape)} sizes, but the buffer has {ndim} dims"]
    bad = [size for size in block_shape if not _is_size(size, 1)]
    return [f"`block_shape` has the size {size!r}, which is no int of at least 1" for size in bad]


def _is_program_id(value: Any) -> bool:
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return all(_is_size(item, 0) for item in value)
    return value is None or _is_size(value, 0)


def is_int(value: Any) -> bool:
    """Whether `value` is an int of Python's or numpy's, and no bool."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_size(value: Any, at_least: int) -> bool:
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


def _of_sharding(mesh: Mesh, ndim: int, sharding: Sharding) -> tuple[dict[str, int], dict[str, str]]:
    if sharding.mesh != mesh:
        refuse(f"the sharding '{sharding}' is for {sharding.mesh}, not {mesh}")
    if sharding.ndim != ndim:
        refuse(f"the sharding '{sharding}' is for {sharding.ndim} dims, but the buffer has {ndim}")
    return sharding.as_dict(), dict(sharding.partial)
