"""What OpSteps are on one device: functions from tiles to tiles, one by one, or those that follow each other as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import Recent
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import OpStep, Step, only
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.aten import ANY, name_of
from mesh_tensor.rules.operator.vjp import VJP, called_with, can_be_recorded, vjp_of

from .dtypes import torch_dtype
from .kernels import Target
from .straight_line import Line, Shape, StraightLine, TileCall
from .tile_memory import keep_heap
from .torch_ops import Valid, added_function, keeps_alike, makes_new, recorded, untyped_function
from .totals import adding

Shapes = tuple[Shape, ...]


_KNOWN: Recent[tuple, TileCall] = Recent(4096)  # of alike calls, as in a model's layers


def tile_calls(step: OpStep, program: Program, ranks: Sequence[int], target: Target) -> list[TileCall]:
    """Per rank the step's call of torch on tiles; for steps of one call, on values that lie alike, the same."""
    if step.checked or differs_by_rank(step) or _looks_at_values(step.call):
        return [_tile_call(step, program, rank, target) for rank in ranks]
    return [_tile_call(step, program, ranks[0], target)] * len(ranks)


class Section:
    """OpSteps that follow each other, and the ends of memory between them, as one action on what a device holds: a dict
    from storages to tiles (`listed`: to lists of one tile). `records`: what torch keeps between operators and their
    gradients (of `recorded_pairs`); `totals`: results that are added to what is held for them (`can_be_totals`)."""

    def __init__(
        self,
        steps: Sequence[Step],
        program: Program,
        rank: int,
        target: Target,
        *,
        listed: bool = False,
        records: Records | None = None,
        totals: Collection[str] = (),
    ) -> None:
        keep_heap()
        self.steps = only(steps, OpStep)
        stored = {name: program.values[name].storage for step in self.steps for name in step.uses}
        lines: list[Line] = []
        for step, ends in _with_ends(steps):
            call = _tile_call(step, program, rank, target)
            names = [tuple(stored[name] for name in group) for group in (step.args, step.results)]
            line = adding(step, Line(call, names[0], names[1], ends), totals)
            record = None if records is None else records.get(step.results[0])
            lines.append(line if record is None else record.line(step, line))
        self._line, self._lines, self._target = StraightLine(lines, listed=listed), lines, target

    def resized(self, program: Program, numbers: Sequence[int], calls: dict[int, TileCall]) -> Section:
        """The same steps, of these numbers, of a program of one device that differs in sizes only; without records and
        totals. `calls`: what is known of it, by the ids of the calls of now."""
        made = copy(self)
        for number, line in zip(numbers, self._lines, strict=True):
            if id(line.call) not in calls:
                (step,) = only((program.steps[number],), OpStep)
                calls[id(line.call)] = _tile_call(step, program, 0, self._target)
        made._lines = [Line(calls[id(line.call)], line.args, line.results, line.ends) for line in self._lines]
        made._line = self._line.with_calls([line.call for line in made._lines])
        return made

    def __call__(self, held: dict[str, Any]) -> None:
        """Run the steps."""
        try:
            self._line.run(held)
        except (RuntimeError, IndexError) as error:
            line = self._line.failed_at(error)
            _refuse_failed(self.steps[line], self._lines[line].call, error)

    def memory(self, size: Callable[[str], int]) -> tuple[dict[str, int], list[str], int]:
        """Of storages, in bytes: those that are there afterwards, and were not before; which ones end that were there
        before; and how much more there is at most than before. `size` is asked of the latter."""
        made: dict[str, int] = {}
        dropped: list[str] = []
        now = peak = 0
        for line in self._lines:
            for name, nbytes in zip(line.results, line.call.nbytes, strict=True):
                if name not in made and name not in line.args:
                    made[name] = nbytes
                    now += nbytes
            peak = max(peak, now)
            for name in line.ends:
                ended = made.pop(name, None)
                if ended is None:
                    dropped.append(name)
                now -= size(name) if ended is None else ended
        return made, dropped, peak

    def failed_at(self, error: BaseException) -> OpStep:
        """The step that raised `error`, or what led to it."""
        return self.steps[self._line.failed_at(error)]


def has_own_memory(program: Program, value: str) -> bool:
    """Whether an operator makes the value in memory that nothing else has a view of."""
    known = [step for step in program.ops if value in step.uses]
    in_loops = any(value in step.uses for step in program.loops)
    return bool(known) and not in_loops and all(step.kernel is None and makes_new(step.call) for step in known)


def in_sections(steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """The steps in order, cut into runs: OpSteps that follow each other with what ends among and after them, or one
    step of another kind."""
    run: list[Step] = []
    for step in steps:
        if not is_section([step]) and not (run and step.ends):
            if run:
                yield tuple(run)
            run = []
            yield (step,)
        else:
            run.append(step)
    if run:
        yield tuple(run)


def is_section(run: Sequence[Step]) -> bool:
    """Whether a run of `in_sections` is of OpSteps."""
    return isinstance(run[0], OpStep)


@dataclass(frozen=True)
class Record:
    """What torch keeps of an operator's call for its gradients, which the step `gradient` computes."""

    name: str
    gradient: OpStep

    def line(self, step: OpStep, line: Line) -> Line:
        """The line of one of the two steps, which keeps it, or takes it."""
        made = recorded(self.gradient.call, line.call.function)
        if step.call.operator == VJP:
            return replace(line, call=replace(line.call, function=made.backward), kept=self.name)
        return replace(line, call=replace(line.call, function=made.forward), keeps=self.name)


#: Records of a program's steps, by their first results.
Records = Mapping[str, Record]


def recorded_pairs(program: Program) -> dict[str, Record]:
    """Operators and their gradients, of the same operands, between which torch can keep something."""
    known: dict[tuple[str, tuple[str, ...]], OpStep] = {}
    records: dict[str, Record] = {}
    for step in program.ops:
        if step.call.operator != VJP and _is_plain(step):
            known.setdefault((step.call.name, step.args), step)
        elif (first := _differentiated(step, known, {})) is not None and first.results[0] not in records:
            records[first.results[0]] = records[step.results[0]] = Record(f"kept of {step.results[0]}", step)
    return records


def carried_pairs(forward: Program, backward: Program, same: Mapping[str, str]) -> tuple[Records, Records]:
    """The same between two programs: for the one that has the operators, and the one that has the gradients. `same` has
    the values that the latter takes, by name, with what they are in the former."""
    known = {(step.call.name, step.args): step for step in reversed(forward.ops) if _is_plain(step)}
    ones: dict[str, Record] = {}
    others: dict[str, Record] = {}
    for step in backward.ops:
        first = _differentiated(step, known, same)
        if first is None or first.results[0] in ones or not keeps_alike(step.call):
            continue
        operands = zip(first.args, step.args, strict=False)
        if all(_lie_alike(forward.values[one], backward.values[other]) for one, other in operands):
            ones[first.results[0]] = others[step.results[0]] = Record(f"kept of {first.results[0]}", step)
    return ones, others


def _is_plain(step: OpStep) -> bool:
    return step.kernel is None and not step.checked


def _differentiated(
    step: OpStep, known: Mapping[tuple[str, tuple[str, ...]], OpStep], same: Mapping[str, str]
) -> OpStep | None:
    """The step whose gradients this one computes, of these."""
    if step.call.operator != VJP or not _is_plain(step) or not can_be_recorded(step.call):
        return None
    forward, names = called_with(step.call, step.args)
    first = known.get((forward.name, tuple([same.get(name, name) for name in names])))
    return first if first is not None and first.call.kind == forward.kind else None


def _lie_alike(one: ProgramValue, other: ProgramValue) -> bool:
    """Whether two values of several programs lie alike, without padding."""
    ranks = range(one.sharding.mesh.num_devices)
    return (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding) and all(
        tuple(one.sharding.valid_extent(one.shape, rank)) == tuple(one.tile_shape) for rank in ranks
    )


def _with_ends(steps: Sequence[Step]) -> list[tuple[OpStep, tuple[str, ...]]]:
    """Each OpStep of a section, and the storages that end before the next one."""
    made: list[tuple[OpStep, list[str]]] = []
    for step in steps:
        if isinstance(step, OpStep):
            made.append((step, []))
        else:
            made[-1][1].extend(step.ends)
    return [(step, tuple(ends)) for step, ends in made]


def results_of(step: OpStep, call: TileCall, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results' tiles of a step, by its call of torch."""
    try:
        made = call.function(*[tile.reshape(shape) for tile, shape in zip(operands, call.takes, strict=True)])
    except (RuntimeError, IndexError) as error:
        _refuse_failed(step, call, error)
    return _finished(call, made)


def added_results_of(
    step: OpStep, call: TileCall, operands: Sequence[torch.Tensor], totals: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The results' tiles, added to totals where there are such, which stay as they are."""
    added = added_function(step.call)
    if added is None or totals[0] is None:
        made = zip(results_of(step, call, operands), totals, strict=True)
        return [tile if total is None else torch.add(total, tile) for tile, total in made]
    given = [tile.reshape(shape) for tile, shape in zip(operands, call.takes, strict=True)]
    return _finished(call, added(*given, totals[0].reshape(call.makes[0]).clone()))


def _finished(call: TileCall, made: Any) -> list[torch.Tensor]:
    made = made if isinstance(made, (tuple, list)) else (made,)
    typed = [tile if tile.dtype is dtype else tile.to(dtype) for tile, dtype in zip(made, call.dtypes, strict=True)]
    results = [tile.reshape(shape) for tile, shape in zip(typed, call.gives, strict=True)]
    return [tile.contiguous() if whole else tile for tile, whole in zip(results, call.whole, strict=True)]


def _tile_call(step: OpStep, program: Program, rank: int, target: Target) -> TileCall:
    """A step on a rank; alike steps, as those of a model's layers, share theirs."""
    values, mesh, call = program.values, program.mesh, step.call
    comes = tuple([values[name].tile_shape for name in step.args])
    gives = tuple([values[name].tile_shape for name in step.results])
    lies = comes, gives, tuple([name in step.whole for name in step.results])
    if step.kernel is not None:
        return _lying(call, _kernel_function(step.kernel, call, target), *lies)
    looks = _looks_at_values(call)
    valid = _valid(step, program, rank) if looks or step.checked else ()
    place = rank if differs_by_rank(step) else 0, valid if step.checked else None
    if not looks or all(each.extent == each.stored for each in valid):
        key = call, mesh, place, lies
        return _KNOWN.made(key, lambda: _lying(call, untyped_function(call, mesh, *place), *lies))
    return _lying(call, _without_padding(untyped_function(call, mesh, *place), call, valid), *lies)


def _looks_at_values(call: OpCall) -> bool:
    """Whether torch may refuse to compute because of values, those of padding too: a matrix that has no inverse."""
    return (vjp_of(call).forward if call.operator == VJP else call).operator == ANY


def _without_padding(function: Callable[..., Any], call: OpCall, valid: Sequence[Valid]) -> Callable[..., Any]:
    """The function of tiles in which padding repeats what is no padding; that of results' gradients stays zero."""
    given = len(vjp_of(call).given) if call.operator == VJP else len(valid)

    def run(*tiles: torch.Tensor) -> Any:
        if any(extent == 0 < size for each in valid for size, extent in zip(each.stored, each.extent, strict=True)):
            return [tiles[0].new_zeros(out.shape, dtype=torch_dtype(out.dtype)) for out in call.outputs]
        repeated = [each.repeated(tile) for tile, each in zip(tiles[:given], valid, strict=False)]
        return function(*repeated, *tiles[given:])

    return run


def _lying(
    call: OpCall, function: Callable[..., Any], comes: Shapes, gives: Shapes, whole: tuple[bool, ...]
) -> TileCall:
    """A function for a call, of tiles that are kept in these shapes."""
    takes, makes = (tuple([tensor.shape for tensor in tensors]) for tensors in (call.inputs, call.outputs))
    dtypes = tuple([torch_dtype(out.dtype) for out in call.outputs])
    return TileCall(function, comes, takes, makes, gives, dtypes, whole)


def _refuse_failed(step: OpStep, call: TileCall, error: Exception) -> NoReturn:
    known = list(call.takes)
    refuse(f"R.{name_of(step.call)} fails on tiles of {known}: {error}", where=step.where)


def _valid(step: OpStep, program: Program, rank: int) -> tuple[Valid, ...]:
    values = [program.values[name] for name in step.args]
    return tuple(Valid(v.tile_shape, tuple(v.sharding.valid_extent(v.shape, rank))) for v in values)


def _kernel_function(func: tirx.PrimFunc, call: OpCall, target: Target) -> Callable[..., list[torch.Tensor]]:
    """A kernel that takes operands, then results, as a function that gives the results."""
    kernel = target.compile(func)
    buffers = [func.buffer_map[param] for param in func.params]
    shapes = [tuple(map(int, buffer.shape)) for buffer in buffers]
    results = [(torch_dtype(out.dtype), out.shape) for out in call.outputs]

    def run(*tiles: torch.Tensor) -> list[torch.Tensor]:
        given = [tile.reshape(shape).contiguous() for tile, shape in zip(tiles, shapes, strict=False)]
        made = [torch.empty(shape, dtype=dtype, device=tiles[0].device) for dtype, shape in results]
        kernel(*given, *(tile.view(shape) for tile, shape in zip(made, shapes[len(given) :], strict=True)))
        return made

    return run


def differs_by_rank(step: OpStep) -> bool:
    """Whether the operator looks at where the device stands."""
    return step.call.operator.startswith("mesh.")
