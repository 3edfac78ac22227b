"""Kernels that walk a dim in groups of another's (rules.kernel.granularity), in a Graph.

Such a dim is a compound one, of the groups and of the places in a group: axes that divide the groups split it with what
belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.window import Reaches
from mesh_tensor.rules.kernel.granularity import Refined, refined
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse
from mesh_tensor.rules.operator.rule import Dim, OpRule


@lru_cache(maxsize=1024)
def in_groups(analysis: Analysis) -> tuple[Refined, Analysis] | None:
    """The kernel with dims taken apart, and what its analysis finds; None where that lets axes split nothing more."""
    dims = [(name, dim) for name, buffer in analysis.kernel.params.items() for dim in range(len(buffer.shape))]
    whole = {dim for dim in dims if analysis.reason_whole(*dim)}
    for made in refined(analysis.kernel.func, [dim for dim in dims if dim in whole]) if whole else ():
        after = analyse(made.func)
        if {(name, dim) for name, dim in dims if after.reason_whole(name, made.outer(name, dim))} < whole:
            return made, after
    return None


def divides_groups(mesh: Mesh, made: Refined) -> bool:
    """Whether every axis divides the groups."""
    shapes = made.shapes()
    counts = [int(shapes[param][made.outer(param, dim)]) for param, dim in made.groups]
    return all(count % mesh.size(axis) == 0 for axis in mesh for count in counts)


def with_compound_dims(rule: OpRule, made: Refined, inputs: Sequence[str], outputs: Sequence[str]) -> OpRule:
    """The rule of the kernel with dims taken apart, as that of the kernel with its own dims."""
    sizes: dict[str, int] = {}
    unsplit: set[str] = set()

    def dims(param: str, found: Sequence[Dim]) -> tuple[Dim, ...]:
        merged: list[Dim] = []
        for parts in made.by_dim(param, list(enumerate(found))):
            if len(parts) == 1:
                merged.append(parts[0][1])
                continue
            names = [factor if isinstance(factor, str) else f"{param}_{at}" for at, factor in parts]
            unsplit.update(name for name, (_, factor) in zip(names, parts, strict=True) if factor is None)
            unsplit.update(names[1:])
            shape = made.shapes()[param]
            sizes.update({name: int(shape[at]) for name, (at, _) in zip(names, parts, strict=True)})
            merged.append(tuple(names))
        return tuple(merged)

    new_inputs = tuple(dims(name, found) for name, found in zip(inputs, rule.inputs, strict=True))
    new_outputs = tuple(dims(name, found) for name, found in zip(outputs, rule.outputs, strict=True))
    none: dict[tuple[int, int], Reaches] = {}
    return replace(rule, inputs=new_inputs, outputs=new_outputs, sizes=sizes, unsplit=frozenset(unsplit), windows=none)
