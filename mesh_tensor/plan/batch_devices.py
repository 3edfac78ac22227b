"""Parts of a batch inside of manual computations: rows that lie on several devices, and what these make of theirs.

A tile of rows is read as a reshape that takes a dim apart into dims of devices and a tile's own, of which every device
takes its part (see `manual_devices`). So are groups of rows followed: as dims, then as devices, and back. In each group
the same has to be done, by operators that keep groups apart: then what is made of rows is made of them in any group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_tensor.rules.operator import OpRule
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, axes_of, factor_of
from mesh_tensor.rules.operator.rule import atoms_of

from .batch_kinds import REGROUPS, Divided, Fixed, Kind, Mean, Mixed, Rows, Sum, mixed, placed_factors, quotient_kinds
from .ir import Graph, Node
from .manual import varying

Place = int | str  # a dim, or an axis whose devices have a value of their own


@dataclass(frozen=True)
class Apart:
    """The batch's rows are in groups, one for each position along `split`, major first. `kind` is what a group has:
    rows, or such sums or means that all groups' together are those of the batch."""

    kind: Rows | Divided | Sum | Mean
    split: tuple[Place, ...]


AnyKind = Kind | Divided | Apart


def kind_within(kind: AnyKind) -> Kind:
    """What a group of rows has, without what it is divided by."""
    kind = kind.kind if isinstance(kind, Apart) else kind
    return kind.rows if isinstance(kind, Divided) else kind


def with_kind(old: AnyKind, new: Kind | Divided) -> AnyKind:
    """The kind with another one within its groups."""
    return new if not isinstance(old, Apart) or isinstance(new, (Mixed, Fixed)) else Apart(new, old.split)


def settled(kind: AnyKind, name: str) -> Kind:
    """What a result is in the end, by its name."""
    if isinstance(kind, Apart):
        return Mixed(f"{name} has the batch's rows in several dims")
    if isinstance(kind, Divided) and not kind.count:
        return Mixed(f"{name} has rows that are divided by how many rows there are")
    return kind_within(kind)


class DeviceKinds:
    """Kinds of what nodes of a graph give; `quotients` as `batch_parts` takes it."""

    def __init__(self, graph: Graph) -> None:
        self._own = {value: {axis for axis, _ in axes} for value, axes in varying(graph).items()}
        self._tiles = _tile_dims(graph)

    def of(self, node: Node, rule: OpRule, kinds: Sequence[AnyKind], quotients: str | None) -> list[AnyKind]:
        """The kinds of a node's results, of its operands'."""
        wrong = next((kind for kind in kinds if isinstance(kind, Mixed)), None)
        if wrong is not None:
            return [wrong] * len(node.outputs)
        name = node.call.operator
        if name in (PER_DEVICE, ALL_DEVICES) and not isinstance(kinds[0], Fixed):
            return [_at_the_edge(node, kinds[0], enters=name == PER_DEVICE)]
        if node in self._tiles and isinstance(kind_within(kinds[0]), Rows):
            return [_tile(node, kinds[0], self._tiles[node])]
        if not any(isinstance(kind, Apart) for kind in kinds):
            return [*_within(node, rule, kinds, quotients)]
        first = kinds[0]
        if node.call.name in REGROUPS and isinstance(first, Apart) and any(isinstance(p, int) for p in first.split):
            return [_regrouped(node, first)]
        return self._in_groups(node, rule, kinds, quotients)

    def _in_groups(self, node: Node, rule: OpRule, kinds: Sequence[AnyKind], quotients: str | None) -> list[AnyKind]:
        """The same in every group, on its own."""
        splits = {
            tuple(rule.inputs[i][p] if isinstance(p, int) else factor_of(p) for p in kind.split)
            for i, kind in enumerate(kinds)
            if isinstance(kind, Apart)
        }
        split = [factor for factor in splits.pop() if isinstance(factor, str)]
        first = next(kind for kind in kinds if isinstance(kind, Apart))
        if splits or len(split) < len(first.split):
            return [*mixed(node, "takes rows that are on devices in several ways")]
        places = dict(zip(split, first.split, strict=True))
        factors = {factor for factor, place in places.items() if isinstance(place, int)}
        axes = {place for place in first.split if isinstance(place, str)}
        why = self._in_the_way(node, rule, kinds, factors, axes)
        if why:
            return [*mixed(node, why)]
        made = _within(node, rule, kinds, quotients)
        return [_grouped(node, rule, kind, places, number) for number, kind in enumerate(made)]

    def _in_the_way(self, node: Node, rule: OpRule, kinds: Sequence[AnyKind], factors: set[str], axes: set[str]) -> str:
        """Why groups, which are along these factors and axes, are not on their own in a node."""
        if factors and (node.kernel is not None or not factors.isdisjoint(placed_factors(rule))):
            return "needs the rows of all devices together"
        for value, kind, dims in zip(node.inputs, kinds, rule.inputs, strict=True):
            if isinstance(kind, Apart):
                if any(d not in kind.split and not factors.isdisjoint(atoms_of(dim)) for d, dim in enumerate(dims)):
                    return f"takes the rows of {value.name} twice"
            elif not isinstance(kind, Fixed):
                return f"takes rows of several devices with {value.name}, which has the batch's rows otherwise"
            elif not axes.isdisjoint(self._own.get(value, ())):
                return f"takes rows of several devices with {value.name}, of which every device has its own"
            elif any(value.type.shape[d] > 1 and not factors.isdisjoint(atoms_of(dims[d])) for d in kind.along):
                return f"takes rows of several devices with {value.name}, which differs between devices"
        return ""


def _within(node: Node, rule: OpRule, kinds: Sequence[AnyKind], quotients: str | None) -> list[Kind | Divided]:
    """Kinds in one group."""
    return quotient_kinds(node, rule, [kind.kind if isinstance(kind, Apart) else kind for kind in kinds], quotients)


def _grouped(node: Node, rule: OpRule, kind: Kind | Divided, places: Mapping[str, Place], number: int) -> AnyKind:
    """A result of which `kind` is what a group has, of operands whose groups are along these factors, at these places:
    groups that are summed up with their rows are no longer there."""
    if isinstance(kind, (Mixed, Fixed)):
        return kind if isinstance(kind, Mixed) else mixed(node, "forgets rows of several devices")[0]
    dims, ops = rule.outputs[number], rule.partial[number] if rule.partial else rule.reduced
    left: list[Place] = []
    for factor, place in places.items():
        if isinstance(place, str):
            left.append(place)
        elif factor in dims:
            left.append(dims.index(factor))
        elif isinstance(kind, (Rows, Divided)) or ops.get(factor) != "sum":
            return mixed(node, "needs the rows of all devices together")[0]
    return Apart(kind, tuple(left)) if left else kind


def _tile_dims(graph: Graph) -> Mapping[Node, frozenset[int]]:
    """The reshapes that take tensors apart into tiles -> which dims of their results are devices'."""
    makers = graph.makers()
    found: dict[Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node.call.operator != PER_DEVICE:
            continue
        (value,), devices = node.inputs, len(axes_of(node.call))
        maker, dims = makers.get(value), list(range(devices))
        if maker is not None and maker.call.name == "permute_dims":
            dims = [int(axis) % value.type.ndim for axis in maker.call.attr("axes") or ()][:devices]
            maker = makers.get(maker.inputs[0])
        if maker is not None and maker.call.name == "reshape":
            found[maker] = frozenset(dims)
    return found


def _tile(node: Node, kind: AnyKind, devices: frozenset[int]) -> AnyKind:
    """Rows of a tensor that is taken apart: per dim into those of devices, then the tile's."""
    source, target = node.inputs[0].type.shape, node.outputs[0].type.shape
    groups: list[list[int]] = []
    for d in range(len(target)):
        if not groups or groups[-1][-1] not in devices:
            groups.append([])
        groups[-1].append(d)
    if [math.prod(target[d] for d in group) for group in groups] != list(source) or len(target) - 1 in devices:
        return mixed(node, "regroups dims so that it is not known which has the batch's rows")[0]
    split = kind.split if isinstance(kind, Apart) else ()
    if any(isinstance(place, int) and len(groups[place]) > 1 for place in split):
        return mixed(node, "takes groups of rows apart")[0]
    rows = kind_within(kind)
    assert isinstance(rows, Rows)
    *apart, own = groups[rows.dim]
    places = [d for d in apart if target[d] > 1]
    count = math.prod(target[d] for d in places)
    if places and (rows.outer > 1 or rows.count % count):
        return mixed(node, "takes rows apart so that devices do not have whole ones")[0]
    made = replace(rows, dim=own, count=rows.count // count)
    return _apart(kind, made, (*(groups[p][0] if isinstance(p, int) else p for p in split), *places))


def _apart(kind: AnyKind, rows: Rows, split: tuple[Place, ...]) -> AnyKind:
    """The kind with other rows, in other groups."""
    inner = kind.kind if isinstance(kind, Apart) else kind
    made = replace(inner, rows=rows) if isinstance(inner, Divided) else rows
    return Apart(made, split) if split else made


def _at_the_edge(node: Node, kind: AnyKind, enters: bool) -> AnyKind:
    """Where dims become what devices have of their own, or this dims again."""
    axes, rows = axes_of(node.call), kind_within(kind)
    split = kind.split if isinstance(kind, Apart) else ()
    shift = -len(axes) if enters else len(axes)
    if enters:
        moved: list[Place] = [p if isinstance(p, str) else axes[p] if p < len(axes) else p + shift for p in split]
    else:
        moved = [p + shift if isinstance(p, int) else axes.index(p) if p in axes else p for p in split]
    if isinstance(rows, Rows):
        if rows.dim + shift < 0:
            return mixed(node, "gives every device some of what is in the batch's rows")[0]
        return _apart(kind, replace(rows, dim=rows.dim + shift), tuple(moved))
    return replace(kind, split=tuple(moved)) if isinstance(kind, Apart) else kind


def _regrouped(node: Node, kind: Apart) -> AnyKind:
    """Groups that are dims, of a tensor whose dims are put together or taken apart: behind them, or they themselves
    with their rows, in order, in one dim."""
    source, target = node.inputs[0].type.shape, node.outputs[0].type.shape
    dims, rows = [place for place in kind.split if isinstance(place, int)], kind_within(kind)
    last = max(*dims, rows.dim if isinstance(rows, Rows) else -1)
    if source[: last + 1] == target[: last + 1]:
        return kind
    inner_most = kind.split[len(kind.split) - len(dims) :] == tuple(dims)
    if (
        isinstance(rows, Rows)
        and rows.outer == 1
        and inner_most
        and [*dims, rows.dim] == [*range(dims[0], rows.dim + 1)]
    ):
        before, count = math.prod(source[: dims[0]]), math.prod(source[d] for d in dims)
        for d, size in enumerate(target):
            if math.prod(target[:d]) == before and size == count * source[rows.dim] and count > 1:
                made = replace(rows, dim=d, count=rows.count * count)
                return _apart(kind, made, kind.split[: len(kind.split) - len(dims)])
    return mixed(node, "regroups dims so that it is not known which has the batch's rows")[0]
