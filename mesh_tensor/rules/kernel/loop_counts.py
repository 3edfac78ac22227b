"""How often statements of a kernel run. Loops whose extents follow from those around them, as the blocks below a
diagonal do, are counted for each value of these; and for the device that has most of them, where they follow from its
coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx

from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.loops import is_one_iteration

from .sizes import is_size, size_function
from .statements import Kernel, Loop, Statement, without_binds

_MOST, _DEVICES = 4096, 64  # values of loops, and devices, that are gone through: of more, as many, evenly spread

Number = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class _Times:
    """How often a loop runs; `start`: the first value of its variable, if others follow from that."""

    count: Number
    start: Number | None


def unknown_extents(kernel: Kernel, known: Sequence[tirx.Var] = ()) -> list[str]:
    """The extents of loops that only data says, where these variables are known: they count as once."""
    found = dict[str, None]()
    for statement in kernel.statements:
        scope = [*known]
        for loop in _several(statement):
            start, extent = (without_binds(e, kernel) for e in (loop.min, loop.extent))
            if not is_size(extent, scope):
                found[str(extent)] = None
            elif is_size(start, scope):
                scope.append(loop.var)
    return list(found)


def total_function(
    terms: Iterable[tuple[Statement, int]],
    kernel: Kernel,
    symbols: Sequence[tirx.Var],
    coordinates: Mapping[tirx.Var, int],
) -> Number:
    """From the values of all `symbols` to what statements amount to, of which one run is so much, on the device with
    most of it. `coordinates`: the variables of a device's, with the sizes of their axes."""
    known = [*symbols, *coordinates]
    counted = [(each, _times(statement, kernel, known)) for statement, each in terms if each]
    used = vars_of((extent for statement, _ in terms for extent in _places(statement, kernel)), {})
    most = _each(_DEVICES, len(used.intersection(coordinates)))
    places = [_spread(size, most) if var in used else (0,) for var, size in coordinates.items()]

    def total(values: Sequence[int]) -> int:
        return max(
            sum(round(each * _all_runs(times, [*values, *at])) for each, times in counted) for at in product(*places)
        )

    return total


def _several(statement: Statement) -> list[Loop]:
    return [loop for loop in statement.loops if loop.node is None or not is_one_iteration(loop.node)]


def _places(statement: Statement, kernel: Kernel) -> list[Any]:
    return [without_binds(e, kernel) for loop in statement.loops for e in (loop.min, loop.extent)]


def _times(statement: Statement, kernel: Kernel, known: Sequence[tirx.Var]) -> list[_Times]:
    """The loops around a statement, the outermost first. One of which only data says how often it runs counts once."""
    found, scope, loops = list[_Times](), list(known), _several(statement)
    for number, loop in enumerate(loops):
        start, extent = (without_binds(e, kernel) for e in (loop.min, loop.extent))
        if not is_size(extent, scope):
            continue
        inner = vars_of((e for other in loops[number + 1 :] for e in (other.min, other.extent)), kernel.binds)
        walked = loop.var in inner and is_size(start, scope)
        found.append(_Times(size_function(extent, scope), size_function(start, scope) if walked else None))
        scope += [loop.var] * walked
    return found


def _all_runs(loops: Sequence[_Times], values: list[int]) -> float:
    return _runs(loops, values, _each(_MOST, sum(loop.start is not None for loop in loops)))


def _runs(loops: Sequence[_Times], values: list[int], most: int) -> float:
    if not loops:
        return 1
    first, rest = loops[0], loops[1:]
    try:
        count, start = max(0, first.count(values)), first.start and first.start(values)
    except ZeroDivisionError:  # no kernel comes there: a branch leaves these values out
        return 0
    if start is None or not count:
        return count * _runs(rest, values, most) if count else 0
    at = _spread(count, most)
    return sum(_runs(rest, [*values, start + each], most) for each in at) * count / len(at)


def _each(most: int, several: int) -> int:
    """How many values of each are gone through, of several, if all together are to be so many at most."""
    return int(most ** (1 / max(1, several)) + 1e-9)


def _spread(count: int, most: int) -> Sequence[int]:
    """The numbers below one, or so many of them, from the first to the last; of one alone, that in the middle."""
    if count <= most:
        return range(count)
    return [count // 2] if most == 1 else [n * (count - 1) // (most - 1) for n in range(most)]
