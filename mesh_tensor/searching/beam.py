"""Beam search over colourings: which named dims every mesh axis splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mesh_tensor.base.mesh import Mesh

from .evaluate import Evaluator, KernelEvaluator, Layouts, Strategy
from .named_dims import NamedDim

Colouring = frozenset[tuple[int, str]]  # (number of a named dim, axis)
Rank = Callable[[Strategy], tuple]


class Beam:
    """The `width` best colourings of a mesh at a time, each with one more dim coloured in every way. It ends where that
    gives nothing better twice in a row, or when `stop` says so."""

    def __init__(
        self, evaluator: Evaluator | KernelEvaluator, dims: Sequence[NamedDim], rank: Rank, width: int
    ) -> None:
        self._evaluator, self._dims, self._rank, self._width = evaluator, dims, rank, width

    def run(self, mesh: Mesh, stop: Callable[[], bool]) -> Iterator[Strategy]:
        """Every strategy that is looked at, once. The first one splits nothing."""
        empty: Colouring = frozenset()
        whole = self._strategy(mesh, empty)
        if whole is None:
            return
        yield whole
        beam, seen, best, idle = [empty], {empty}, self._rank(whole), 0
        while beam and idle < 2 and not stop():
            found: list[tuple[tuple, int, Colouring]] = []
            for colouring in (more for each in beam for more in self._more(each, mesh)):
                if colouring in seen or stop():
                    continue
                seen.add(colouring)
                strategy = self._strategy(mesh, colouring)
                if strategy is not None:
                    found.append((self._rank(strategy), len(found), colouring))
                    yield strategy
            found.sort(key=lambda each: each[:2])
            beam = [colouring for _, _, colouring in found[: self._width]]
            idle = 0 if found and found[0][0] < best else idle + 1
            best = min([best, *(rank for rank, _, _ in found[:1])])

    def _more(self, colouring: Colouring, mesh: Mesh) -> Iterator[Colouring]:
        for number, dim in enumerate(self._dims):
            for axis in mesh:
                if mesh.size(axis) <= dim.size and (number, axis) not in colouring:
                    yield colouring | {(number, axis)}

    def _strategy(self, mesh: Mesh, colouring: Colouring) -> Strategy | None:
        return self._evaluator.strategy(mesh, layouts_of(self._dims, colouring))


def layouts_of(dims: Sequence[NamedDim], colouring: Colouring) -> Layouts:
    """The parameters' layouts. Where an axis would split two dims of one, the first named dim has it."""
    layouts: dict[str, dict[str, int]] = {}
    for number, axis in sorted(colouring):
        for name, dim in dims[number].dims:
            layouts.setdefault(name, {}).setdefault(axis, dim)
    return layouts
