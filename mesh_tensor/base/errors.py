"""The one error class of mesh_tensor, and the helper that words its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

_LONGEST = 120  # characters of a value in a message


class MeshTensorError(ValueError):
    """What was asked for can't be done. The message says what, where, why and how to fix it; nothing was changed. It is
    a ValueError, too."""


def refuse(what: str | Sequence[str], *, where: str = "", why: str = "", fix: str = "") -> NoReturn:
    """Raise a MeshTensorError; several facts in `what` (all the offenders) are listed one per line.

    >>> refuse("axis 'z' does not exist", where="buffer 'A'", why="the mesh has x, y", fix="use one of them")
    Traceback (most recent call last):
    mesh_tensor.base.errors.MeshTensorError: axis 'z' does not exist
      where: buffer 'A'
      why: the mesh has x, y
      fix: use one of them
    """
    facts = [what] if isinstance(what, str) else list(what)
    lines = facts if len(facts) == 1 else [f"{len(facts)} problems:", *(f"  - {fact}" for fact in facts)]
    labelled = (("where", where), ("why", why), ("fix", fix))
    raise MeshTensorError("\n".join([*lines, *(f"  {label}: {text}" for label, text in labelled if text)]))


def words_of(error: BaseException) -> str:
    """An exception in words: its kind is told unless it is a MeshTensorError."""
    return str(error) if isinstance(error, MeshTensorError) else f"{type(error).__name__}: {error}"


def listing(names: Sequence[object]) -> str:
    """Names as messages show them: `'x', 'y'`, or `none`."""
    return ", ".join(repr(name) for name in names) or "none"


def shown(value: object) -> str:
    """A caller's value as messages show it: its repr in one line, cut where it is long.

    >>> shown({0: "x"}), len(shown("a" * 5000))
    ("{0: 'x'}", 120)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def did_you_mean(wanted: object, names: Iterable[str]) -> str:
    """The end of a message about a name that does not exist: what is most like it, or nothing.

    >>> did_you_mean("partials", ("partial", "sharding"))
    "; did you mean 'partial'?"
    """
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(str(wanted).lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
