"""A row of the table of constructs, and the examples that show that it is true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
from tvm import tirx

Verdict = Literal["understood", "refused", "not in kernels"]

#: X and Y split over their first dim.
ROWS: Mapping[str, Mapping[str, int]] = {"X": {"x": 0}, "Y": {"x": 0}}


@dataclass(frozen=True)
class Example:
    """A kernel that uses the construct: on `inputs` it gives `reference(*inputs)`, on one device and on several.

    Of a construct that is refused, `reference` is None."""

    name: str
    kernel: Callable[[], tirx.PrimFunc]
    inputs: tuple[np.ndarray, ...]
    reference: Callable[..., np.ndarray] | None = None
    sharding: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: ROWS)
    targets: tuple[str, ...] = ("interpret", "c")


@dataclass(frozen=True)
class Row:
    """Constructs that are alike. `names` are those of `tilelang.language`, `ops` registered operators, `nodes` classes
    of TIR: each a text of patterns. `says`: what is understood by them, or the message of the refusal in part, or why
    no kernel holds them."""

    title: str
    verdict: Verdict
    says: str
    names: str = ""
    ops: str = ""
    nodes: str = ""
    examples: tuple[Example, ...] = ()

    def has_name(self, name: str) -> bool:
        return _matches(name, self.names)

    def has_op(self, op: str) -> bool:
        return _matches(op, self.ops)

    def has_node(self, node: str) -> bool:
        return _matches(node, self.nodes)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def matrix(rows: int = 12, columns: int = 4, seed: int = 0) -> np.ndarray:
    """Random numbers of both signs."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
