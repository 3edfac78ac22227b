"""Which axes may be worth taking apart, so that one splits two factors: those that are stated of a dim whose first
factor they don't divide, but a part of them does. 8 devices on 4 key heads: 4 on the heads, 2 on what follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.sub_axes import Refinement

from .atoms import Atoms
from .ir import Graph
from .reader import Annotations

_MOST = 3  # plans that are tried


def refinements(graph: Graph, atoms: Atoms) -> list[Refinement]:
    """The meshes in which such an axis is two, those first that are asked for first."""
    found: dict[Refinement, None] = {}
    for value, annotation in graph.annotations.items():
        shape = atoms.shape(value)
        for axis, dim in annotation.sharding.as_dict().items():
            size, first = graph.mesh.size(axis), shape[atoms.positions(value, dim)[0]]
            major = math.gcd(size, first)
            if len(atoms.of[value][dim]) > 1 and 1 < major < size and axis not in graph.manual:
                names = [f"{axis}:(1){major}"]
                found[Refinement.by_names(graph.mesh, names)] = None
    return list(found)[:_MOST]


def refined_annotations(annotations: Annotations, refinement: Refinement) -> dict[tuple[str, str], Annotation]:
    """What is stated, of the parts of axes."""
    return {key: refined_annotation(stated, refinement) for key, stated in annotations.items()}


def refined_annotation(stated: Annotation, refinement: Refinement) -> Annotation:
    """What is stated of a value, of the parts of axes."""
    later: Mapping[str, int] = refinement.expanded(dict(stated.later))
    replicated = tuple(part for axis in stated.replicated for part in refinement.axes(axis))
    sharding = refinement.refine(stated.sharding)
    return replace(stated, sharding=sharding, later=tuple(later.items()), replicated=replicated)
