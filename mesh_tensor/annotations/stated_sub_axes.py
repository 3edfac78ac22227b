"""Sub-axes in what users state: `{"x:(1)4": 0, "x:(4)2": 1}`, wherever a dict names axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding_text import parse_dict
from mesh_tensor.base.sub_axes import Refinement, named_part

_INNER = ("sharding", "partial")  # of metadata: what are dicts from axes
_LISTED = "replicate"


def stated_refinement(mesh: Mesh, shardings: Any, priority: Mapping[str, Any]) -> Refinement:
    """The mesh in which all sub-axes that layouts and priorities name are made of axes.

    Raises:
        MeshTensorError: a sub-axis is no part of its axis, or two of them overlap.
    """
    layouts = [*(shardings.values() if isinstance(shardings, Mapping) else ()), *priority.values()]
    return Refinement.by_names(mesh, [name for layout in layouts for name in _names(layout)])


def names_parts(mesh: Mesh, layout: Any) -> bool:
    """Whether a layout names a sub-axis."""
    return any(named_part(mesh, name) is not None for name in _names(layout))


def with_parts(refinement: Refinement, layout: Any) -> Any:
    """What is stated, of the axes of the refined mesh."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return layout
    inner = {key: with_parts(refinement, layout[key]) for key in _INNER if isinstance(layout.get(key), Mapping)}
    if not inner and _LISTED not in layout:
        return refinement.expanded(layout)
    listed = layout.get(_LISTED, ())
    listed = (listed,) if isinstance(listed, str) else listed
    if _LISTED in layout:
        inner[_LISTED] = tuple(axis for name in listed for axis in refinement.axes(name))
    return {**layout, **inner}


def stated_replicated(refinement: Refinement, layout: Any) -> tuple[str, ...]:
    """The axes of the refined mesh that a dict says are replicated, by None or under `replicate`."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return ()
    inner = layout.get("sharding")
    found = [
        name
        for key, dim in (inner if isinstance(inner, Mapping) else layout).items()
        if dim is None
        for name in (key if isinstance(key, tuple) else (key,))
    ]
    listed = layout.get(_LISTED, ())
    found += [listed] if isinstance(listed, str) else listed or ()
    return refinement.mesh.in_order(axis for name in found for axis in refinement.axes(name) if axis in refinement.mesh)


def _names(layout: Any) -> Iterator[Any]:
    """All that could be names of axes."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return
    for key in layout:
        yield from key if isinstance(key, tuple) else (key,)
    for key in _INNER:
        yield from _names(layout.get(key))
    listed = layout.get(_LISTED, ())
    yield from (listed,) if isinstance(listed, str) else listed if isinstance(listed, (tuple, list)) else ()


def _read(layout: Any) -> Any:
    """A dict that is written as a text; anything else, and what can't be read, as it is."""
    try:
        return parse_dict(layout) if isinstance(layout, str) and layout.strip().startswith("{") else layout
    except MeshTensorError:
        return layout
