"""The text forms of a sharding: `{"x": 0, "y": 1}` and DistIR's `S[0], R`."""

from __future__ import annotations

import ast
import json
import re

from .errors import listing, refuse
from .mesh import Mesh

_ITEM = re.compile(r"S\[\s*(?P<dim>-?\d+)\s*\]|R|P\[\s*(?P<op>\w+)\s*\]")


def parse_text(mesh: Mesh, text: str, name: str) -> tuple[dict[str, int | None], dict[str, str]]:
    """What `text` states: axis -> dim (None: replicated), and axis -> op of the partial ones."""
    stripped = text.strip()
    if stripped.startswith("{"):
        return _parse_dict(mesh, stripped, name), {}
    return _parse_distir(mesh, stripped, name)


def _parse_dict(mesh: Mesh, text: str, name: str) -> dict[str, int | None]:
    for load, error in ((json.loads, ValueError), (ast.literal_eval, (ValueError, SyntaxError))):
        try:
            value = load(text)
        except error:
            continue
        if isinstance(value, dict):
            return value
    return _unreadable(mesh, text, name, "it is no dict")


def _parse_distir(mesh: Mesh, text: str, name: str) -> tuple[dict[str, int | None], dict[str, str]]:
    items = [item.strip() for item in text.split(",")]
    matches = [_ITEM.fullmatch(item) for item in items]
    if None in matches:
        bad = [item for item, match in zip(items, matches, strict=True) if match is None]
        _unreadable(mesh, text, name, f"{listing(bad)} is none of S[dim], R, P[op]")
    if len(items) != len(mesh):
        _unreadable(mesh, text, name, f"it has {len(items)} placements, but the mesh has {len(mesh)} axes")
    sharding: dict[str, int | None] = {}
    partial: dict[str, str] = {}
    for axis, match in zip(mesh, matches, strict=True):
        assert match is not None
        if match["op"]:
            partial[axis] = match["op"]
        else:
            sharding[axis] = None if match["dim"] is None else int(match["dim"])
    return sharding, partial


def _unreadable(mesh: Mesh, text: str, name: str, why: str) -> dict[str, int | None]:
    example = ", ".join(["S[0]", *["R"] * (len(mesh) - 1)])
    refuse(
        f"can't read the sharding {text!r}",
        where=f"buffer {name!r} on {mesh}" if name else str(mesh),
        why=why,
        fix=f'write one placement per mesh axis, as in "{example}", or a dict, as in {{"{mesh.axis_names[0]}": 0}}',
    )
