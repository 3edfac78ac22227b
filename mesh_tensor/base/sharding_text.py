"""The text forms of a sharding: `{"x": 0, "y": 1}` and DistIR's `S[0], R`."""

from __future__ import annotations

import ast
import re
from typing import Any

from .errors import listing, refuse, shown
from .mesh import Mesh
from .placement import Shard

_ITEM = re.compile(r"S\[\s*(?P<dim>-?\d+)\s*(:\s*(?P<minor>\d+)\s*)?\]|R|P\[\s*(?P<op>\w+)\s*\]")


def parse_text(mesh: Mesh, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What `text` states: axis -> dim or Shard (None: replicated), and axis -> op of the partial ones."""
    stripped = text.strip()
    return (parse_dict(stripped), {}) if stripped.startswith("{") else _parse_distir(mesh, stripped)


def how_to_write(mesh: Mesh) -> str:
    """The way out of a text that can't be read."""
    example = ", ".join(["S[0]", *["R"] * (len(mesh) - 1)])
    return f'write one placement per mesh axis, as in "{example}", or a dict, as in {{"{mesh.axis_names[0]}": 0}}'


def parse_dict(text: str) -> dict[str, Any]:
    """A Python dict display (JSON's null is None); an axis may be named once."""
    try:
        tree = ast.parse(re.sub(r"\bnull\b", "None", text), mode="eval").body
        pairs = list(zip(tree.keys, tree.values, strict=True)) if isinstance(tree, ast.Dict) else [(None, tree)]
        items = [(ast.literal_eval(key or "*"), ast.literal_eval(value)) for key, value in pairs]
    except (ValueError, SyntaxError):
        refuse(f"can't read the sharding {shown(text)}: it is not a dict")
    found: dict[str, Any] = {}
    for axis, dim in items:
        if axis in found:
            refuse(f"can't read the sharding {shown(text)}: axis {axis!r} is on two dims, {found[axis]} and {dim}")
        found[axis] = dim
    return found


def _parse_distir(mesh: Mesh, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    items = [item.strip() for item in text.split(",")]
    bad = [item for item in items if not _ITEM.fullmatch(item)]
    if bad:
        refuse(f"can't read the sharding {shown(text)}: {listing(bad)} is none of S[dim], R, P[op]")
    if len(items) != len(mesh):
        axes = f"the mesh has {len(mesh)} axes ({listing(mesh.axis_names)})"
        refuse(f"can't read the sharding {shown(text)}: {axes}, but placements: {len(items)}")
    sharding: dict[str, Any] = {}
    partial: dict[str, str] = {}
    for axis, item in zip(mesh, items, strict=True):
        if item.startswith("P"):
            partial[axis] = item[2:-1].strip()
        else:
            dim, _, minor = item[2:-1].partition(":")
            sharding[axis] = None if item == "R" else Shard(int(dim), int(minor)) if minor else int(dim)
    return sharding, partial
