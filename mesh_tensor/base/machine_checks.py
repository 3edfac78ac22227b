"""What can't be, of a machine's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from .errors import refuse, shown

if TYPE_CHECKING:
    from .machine import Machine


_LEAST, _MOST = 1e-30, 1e30  # what numbers of a machine are between, or times overflow that are made of them


def unfit_parts(machine: Machine, parts: Mapping[str, type]) -> Iterable[str]:
    """What is no mapping, no sequence, or has other items than it should; `parts`: what the items of fields are."""
    for name in ("flops", "classes", "sources"):
        if not isinstance(getattr(machine, name), Mapping):
            yield f"{name} is {shown(getattr(machine, name))}, no mapping"
    for name, kind in parts.items():
        value = getattr(machine, name)
        if name == "tuning":
            items: Iterable[object] = (value,)
        elif isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, Sequence):
            items = value
        else:
            items = () if name == "classes" else (value,)
            if isinstance(value, kind):
                yield f"{name} is {shown(value)}, no list of them"
        yield from (f"{name} has {shown(item)}, no {kind.__name__}" for item in items if not isinstance(item, kind))


def problems_of(machine: Machine) -> Iterable[str]:
    """What can't be, of a machine's numbers."""
    if not isinstance(machine.name, str) or not machine.name:
        yield f"its name is {shown(machine.name)}"
    processor: object = machine.processor
    if not (processor is None or isinstance(processor, str)):
        yield f"processor is {shown(processor)}, no text"
    if not machine.flops:
        yield "no rate of operations (flops)"
    if not machine.memory:
        yield "no memory"
    yield from _names(machine)
    yield from _above_zero({f"flops of {dtype}": rate for dtype, rate in machine.flops.items()})
    for number, level in enumerate(machine.memory):
        yield from _above_zero({f"memory[{number}].size": level.size, f"memory[{number}].rate": level.rate})
    yield from _growing("memory", [level.size for level in machine.memory])
    for link in machine.links:
        yield from _above_zero({f"rate of link {link.name}": link.rate})
        yield from _from_zero({f"start of link {link.name}": link.start, f"hop of link {link.name}": link.hop})
    yield from _whole({f"devices of link {link.name}": link.devices for link in machine.links})
    yield from _growing("links", [math.inf if link.devices is None else link.devices for link in machine.links])
    yield from _from_zero(
        {"launch": machine.launch, "call": machine.call, "busy": machine.busy, "price": machine.price or 0.0}
    )
    yield from _from_zero(
        {"turn": machine.turn, "start": machine.start, "action": machine.action, "value": machine.value}
    )
    yield from _from_zero({"result": machine.result, "cold_start": machine.cold_start, "apart": machine.apart})
    if isinstance(machine.busy, (int, float)) and machine.busy > 1:
        yield f"busy is {machine.busy}, a share"
    counts = {"devices": machine.devices, "processors": machine.processors, "channel_block": machine.channel_block}
    yield from _whole(counts)
    for name, roofline in machine.classes.items():
        yield from _above_zero({f"flops of class {name}": roofline.flops, f"memory of class {name}": roofline.memory})
        yield from _from_zero({f"start of class {name}": roofline.start, f"again of class {name}": roofline.again})
    yield from _above_zero({f"tuning.{name}": number for name, number in vars(machine.tuning).items()})


def _names(machine: Machine) -> Iterable[str]:
    """What is wrong with the names of its parts: links are streams of a device beside its own."""
    for what in ("flops", "classes", "sources"):
        names = list(getattr(machine, what))
        yield from (f"{what} has the name {shown(name)}, no text" for name in names if not isinstance(name, str))
    yield from (f"a link's name is {shown(e.name)}" for e in machine.links if not isinstance(e.name, str) or not e.name)
    links = [link.name for link in machine.links if isinstance(link.name, str)]
    counts = {name: links.count(name) for name in links}
    yield from (f"{count} links are called {name!r}" for name, count in counts.items() if count > 1)
    if "device" in links:
        yield "a link is called 'device', as what a device computes is"


def _whole(counts: Mapping[str, object]) -> Iterable[str]:
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            yield f"{name} is {shown(count)}, no whole number above 0"


def _above_zero(numbers: Mapping[str, object]) -> Iterable[str]:
    for name, number in numbers.items():
        if not _is_number(number) or not _LEAST <= number <= _MOST:  # type: ignore[operator]
            yield f"{name} is {shown(number)}"


def _from_zero(numbers: Mapping[str, object]) -> Iterable[str]:
    for name, number in numbers.items():
        if not _is_number(number) or not 0 <= number <= _MOST:  # type: ignore[operator]
            yield f"{name} is {shown(number)}"


def check_number(name: str, number: object, *, where: str, fix: str, above_zero: bool = False) -> None:
    """Refuse what is no finite number from 0 up, or above it."""
    if not _is_number(number, Real) or number < 0 or (above_zero and not number):  # type: ignore[operator]
        refuse(f"{name} is {shown(number)}", where=where, fix=fix)


def _is_number(number: object, kinds: type | tuple[type, ...] = (int, float)) -> bool:
    try:
        return isinstance(number, kinds) and not isinstance(number, bool) and math.isfinite(number)  # type: ignore[arg-type]
    except OverflowError:  # a whole number that no float is near
        return False


def _growing(what: str, sizes: Sequence[float]) -> Iterable[str]:
    if any(not isinstance(size, (int, float)) for size in sizes):
        yield f"{what} without a size"
    elif any(inner >= outer for inner, outer in zip(sizes, sizes[1:], strict=False)):
        yield f"{what} are not in order: the nearest and smallest comes first"
