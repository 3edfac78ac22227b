"""What a loop over blocks of `k` carries."""

from __future__ import annotations

from collections.abc import Callable

from . import combined, in_turns, ordered
from .blocks import Carried
from .scene import Scene


def draw(scene: Scene, over: str) -> Carried:
    """A state of a loop over k, of blocks of the dims `over`."""
    kind = scene.pick(STATES)
    scene.seen.add(kind)
    return _KINDS[kind](scene, over)


_KINDS: dict[str, Callable[[Scene, str], Carried]] = {
    "reduction": combined.plain,
    "counts": combined.integers,
    "bits": combined.bits,
    "product": combined.product,
    "sums now and then": combined.promoted,
    "online softmax": combined.online,
    "logarithm of a sum": combined.logarithm,
    "linear state": ordered.linear,
    "running extreme": ordered.running,
    "best": ordered.best,
    "order matters": ordered.last,
    "chunks": ordered.chunks,
    "reducer": combined.by_a_reducer,
    "registers": in_turns.registers,
    "copied": in_turns.copied,
    "whole numbers": in_turns.generator,
    "toggled": in_turns.toggled,
    "carried on": in_turns.carried_on,
}
STATES = (
    *["reduction"] * 2,
    "counts",
    "product",
    "sums now and then",
    *["online softmax"] * 3,
    *["logarithm of a sum"] * 2,
    *["linear state"] * 3,
    *["running extreme"] * 2,
    *["best"] * 2,
    "order matters",
    "chunks",
    "bits",
    "reducer",
    "registers",
    *["copied"] * 2,
    "whole numbers",
    "toggled",
    "carried on",
)
