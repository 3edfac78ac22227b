"""A random module as data: its text, its parameters, and how it is stated to lie on a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Param:
    """A parameter of `main`. `below`: an index, so large at most; `bound`: no element is larger, either way."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float = 3.0
    below: int | None = None


@dataclass(frozen=True)
class Case:
    """A module as TVMScript, and what is stated about its values.

    `whole`: floats are small whole numbers, and results listed in `exact` (their positions) are so too, whatever the
    order of sums. `typed`: layouts of parameters are written as R.DTensor types where TVM's parser takes them.
    `weights` are given once. `spread`: parameters that are passed as MeshTensors, in these layouts."""

    source: str
    params: tuple[Param, ...]
    mesh: dict[str, int]
    shardings: dict[str, object]
    open: tuple[str, ...] = ()
    priority: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    barriers: dict[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    spread: dict[str, dict[str, int]] = field(default_factory=dict)
    typed: bool = False
    whole: bool = False
    exact: tuple[int, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        extra = {
            k: v
            for k in ("open", "priority", "groups", "barriers", "weights", "spread", "typed", "whole")
            if (v := getattr(self, k))
        }
        told = [f"mesh = {self.mesh}", f"shardings = {self.shardings}", *(f"{k} = {v}" for k, v in extra.items())]
        return "\n".join([self.source, *told])
