"""The one error class of mesh_tensor, and the helper that words its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


class MeshTensorError(ValueError):
    """What was asked for can't be done: the message says what, where, why and the way out. Nothing was changed."""


def refuse(what: str | Sequence[str], *, where: str = "", why: str = "", fix: str = "") -> NoReturn:
    """Raise a MeshTensorError; several facts in `what` (all the offenders) are listed one per line.

    >>> refuse("axis 'z' does not exist", where="buffer 'A'", why="the mesh has x, y", fix="use one of them")
    Traceback (most recent call last):
    mesh_tensor.errors.MeshTensorError: axis 'z' does not exist
      where: buffer 'A'
      why: the mesh has x, y
      fix: use one of them
    """
    facts = [what] if isinstance(what, str) else list(what)
    lines = facts if len(facts) == 1 else [f"{len(facts)} problems:", *(f"  - {fact}" for fact in facts)]
    labelled = (("where", where), ("why", why), ("fix", fix))
    raise MeshTensorError("\n".join([*lines, *(f"  {label}: {text}" for label, text in labelled if text)]))


def listing(names: Sequence[object]) -> str:
    """Names as messages show them: `'x', 'y'`, or `none`."""
    return ", ".join(repr(name) for name in names) or "none"
