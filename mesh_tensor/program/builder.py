"""What the Programs of kernels (from_kernel) and of modules (from_graph) are built with: steps that change layouts,
when memory comes to life and ends, and updates in place.

A step of an optimizer writes into the memory of what it replaces, after all that may fail. Memory that callers bring is
written only where the steps from `Program.overwrites_from` on do nothing else: until then a run can be given up, and
what was brought is as it was. So updates come last, each in place of the parameter and the slots that no other step
needs; those whose results something else takes (as collectives do) stay where they are.

    d_w = ...                                       d_w = ...
    new_w, new_m = mesh.update(w, d_w, m)           loss = ...
    loss = ...                                      w, m = fused.update_in_place(w, d_w, m)

Results that others wait for may be made before all that they don't need: what a stage's backward hands on is on its way
while the gradients of the stage's own weights are computed, as zero-bubble schedules have it between two actions.

    product dW2 = X2^T dY         product dX2 = dY W2^T
    product dX2 = dY W2^T         product dX1 = dX2 W1^T
    product dW1 = X1^T dX2        (hand on dX1)
    product dX1 = dX2 W1^T        product dW2 = X2^T dY
    (hand on dX1)                 product dW1 = X1^T dX2

What comes later holds its operands until then: as much comes later as takes no more memory than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from mesh_tensor.base.optimizer import GRADIENT_NORM, GROWING, PARAMETER_NORM, SCALE_NORM, SLOT_NORM
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.update import UPDATE, UPDATE_IN_PLACE, optimizer_of

from .program import Parameter, Program, ProgramValue, bytes_received
from .steps import AllocStep, CollectiveStep, FreeStep, OpStep, Step, only
from .verify import peak_bytes


class Lasting(Protocol):
    """A step, or what becomes one: the values that it uses, and of these what comes in memory of its own."""

    @property
    def uses(self) -> tuple[str, ...]: ...

    @property
    def makes(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Lasting)


class Stored(Protocol):
    """What lies in a storage: a value, or what becomes one."""

    @property
    def storage(self) -> str: ...


def collective_step(move: Move, src: ProgramValue, dst: ProgramValue, reason: str) -> CollectiveStep:
    """The step that moves `src` into `dst`, with the bytes that it takes."""
    size = bytes_received(move.kind, src, dst, move.axes)
    return CollectiveStep(move.kind, src.name, dst.name, move.axes, move.op, move.src_dim, move.dst_dim, size, reason)


def with_lifetimes(
    steps: Sequence[T], values: Mapping[str, Stored], parameters: Sequence[Parameter]
) -> tuple[T | AllocStep | FreeStep, ...]:
    """`steps`, and each storage is allocated before its first use, and workspaces are freed after their last."""
    kept = {values[p.input].storage for p in parameters if p.input is not None}
    outputs = {values[p.output].storage for p in parameters if p.output is not None}
    uses = [dict.fromkeys(values[name].storage for name in step.uses) for step in steps]
    last = {storage: index for index, storages in enumerate(uses) for storage in storages}
    lasting = kept | outputs
    alive = set(kept)
    result: list[T | AllocStep | FreeStep] = []
    for index, step in enumerate(steps):
        new = [storage for storage in uses[index] if storage not in alive]
        alive.update(new)
        made = {values[name].storage for name in step.makes}
        result += [AllocStep(storage) for storage in new if storage not in made]
        result.append(step)
        result += [FreeStep(storage) for storage in uses[index] if last[storage] == index and storage not in lasting]
    return tuple(result)


def with_ends(steps: Sequence[Step], values: Mapping[str, Stored], storages: Collection[str]) -> tuple[Step, ...]:
    """`steps`, and these storages, which callers brought, are freed after their last use."""
    last = {values[name].storage: index for index, step in enumerate(steps) for name in step.uses}
    ends: dict[int, list[Step]] = {}
    for storage in storages:
        if storage in last:
            ends.setdefault(last[storage], []).append(FreeStep(storage))
    return tuple(each for index, step in enumerate(steps) for each in (step, *ends.get(index, ())))


def with_updates_in_place(
    steps: Sequence[Step], values: Mapping[str, ProgramValue], state: Mapping[str, str]
) -> tuple[Sequence[Step], dict[str, ProgramValue]]:
    """The steps, without those about memory, and the values that get other storages. `state`: by the name of a value
    that callers bring, that of the value that replaces it in the next call."""
    uses: dict[str, int] = {}
    for step in steps:
        for name in step.uses:
            uses[values[name].storage] = uses.get(values[name].storage, 0) + 1
    replaces: dict[str, list[str]] = {}
    for old, new in state.items():
        replaces.setdefault(new, []).append(old)
    updates = [step for step in only(steps, OpStep) if step.call.operator == UPDATE]
    taken = Counter(values[name].storage for step in updates for name in step.args)
    last: dict[int, Step] = {}
    stored: dict[str, ProgramValue] = {}
    for step in updates:
        pairs = _replaced(step)
        alone = all(taken[values[old].storage] == 1 for old, _ in pairs)
        if pairs and alone and all(replaces.get(new) == [old] and _fit(values, uses, old, new) for old, new in pairs):
            call = OpCall(UPDATE_IN_PLACE, step.call.expr, step.call.inputs, step.call.outputs)
            last[id(step)] = replace(step, call=call)
            stored |= {new: replace(values[new], storage=values[old].storage) for old, new in pairs}
    first = [step for step in steps if id(step) not in last]
    return ([*first, *last.values()], stored) if last else (steps, {})


def _replaced(step: OpStep) -> list[tuple[str, str]]:
    """What an update replaces, and by what; nothing where its results are not sure to be finite."""
    optimizer, count = optimizer_of(step.call)
    if not optimizer.stays_finite or step.call.inputs[0].dtype == "float16":
        return []
    return list(zip((step.args[0], *step.args[2 : 2 + count]), step.results, strict=True))


def _fit(values: Mapping[str, ProgramValue], uses: Mapping[str, int], old: str, new: str) -> bool:
    """Whether one may have the memory of the other. Products and sums read a parameter before it is updated; what is
    made of it is only given to callers."""
    before, after = values[old], values[new]
    return (
        uses[after.storage] == 1
        and (before.shape, before.dtype, before.sharding) == (after.shape, after.dtype, after.sharding)
        and before.slab is None is after.slab
    )


@dataclass(frozen=True)
class Overwritten:
    """What a run overwrites of what callers bring, and what makes that sure to be finite.

    storages   what is overwritten
    norms      by the name of a value, how large its norm may be on a device
    kept       the storages of all else that callers bring or get, and that updates take: what shares memory with them
               must not be overwritten
    """

    storages: tuple[str, ...]
    norms: Mapping[str, float]
    kept: tuple[str, ...]

    @staticmethod
    def of(program: Program) -> Overwritten:
        """That of the updates in place."""
        storages: dict[str, None] = {}
        norms: dict[str, float] = {}
        taken = set[str]()
        for step in program.ops:
            if step.call.name != UPDATE_IN_PLACE:
                continue
            optimizer, count = optimizer_of(step.call)
            storages |= dict.fromkeys(program.values[name].storage for name in step.results)
            slots = step.args[2 : 2 + count]
            taken |= {program.values[name].storage for name in step.args}
            norms |= {step.args[0]: PARAMETER_NORM, step.args[1]: GRADIENT_NORM}
            norms |= dict.fromkeys(step.args[3 + count :], SCALE_NORM)
            norms |= {slots[n]: SLOT_NORM for n, slot in enumerate(optimizer.slots) if slot in GROWING}
        kept = sorted((program.inputs | program.outputs | taken).difference(storages))
        return Overwritten(tuple(storages), norms, tuple(kept))


_TRIES = 8  # how finely what comes later is measured


def handed_on_first(
    program: Program, wanted: Collection[str], ends: Collection[str], totals: Collection[str], kept: Mapping[str, str]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps until the values `wanted` are there, and those that come then. Inputs in the storages `ends` are freed
    after their last use; `totals`: values that may be added to what is there before; `kept`: by their first results,
    the names of what steps leave for others, or take of theirs, beside values."""
    values = program.values
    work = [step for step in program.steps if not step.begins and not step.ends]
    whole = with_ends(program.steps, values, ends), ()
    storages = {values[name].storage for name in wanted}
    made = [number for number, step in enumerate(work) if storages & _stored(program, step.writes)]
    if not made or len(program.ops) < len(work):
        return whole
    before, after = work[: made[-1] + 1], work[made[-1] + 1 :]
    free = _not_needed(program, before, storages, kept)
    most = _peaks(program, whole[0], totals)
    for left in range(_TRIES):
        later = set(free[len(free) * left // _TRIES :])
        first = [step for number, step in enumerate(before) if number not in later]
        rest = [*(before[number] for number in sorted(later)), *after]
        steps = with_ends(with_lifetimes([*first, *rest], values, program.parameters), values, ends)
        if all(now <= then for now, then in zip(_peaks(program, steps, totals), most, strict=True)):
            behind = 1 + next(number for number, step in enumerate(steps) if step is first[-1])
            while behind < len(steps) and steps[behind].ends:
                behind += 1
            return steps[:behind], steps[behind:]
    return whole


def _not_needed(program: Program, steps: Sequence[Step], wanted: Collection[str], kept: Mapping[str, str]) -> list[int]:
    """The numbers of the steps that the last one doesn't need, nor those that make what is in the storages `wanted`,
    nor any that these need."""
    found: list[int] = []
    touched = [_touched(program, step, kept) for step in steps]
    uses, writes = touched[-1][0].union(wanted), touched[-1][1]
    for number in range(len(steps) - 2, -1, -1):
        used, written = touched[number]
        if written & uses or used & writes:
            uses, writes = uses | used, writes | written
        else:
            found.append(number)
    return found[::-1]


def _touched(program: Program, step: Step, kept: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The storages that a step uses, and those that it writes; in both what it leaves for another step, or takes."""
    between = {kept[name] for name in step.writes if name in kept}
    return _stored(program, step.uses) | between, _stored(program, step.writes) | between


def _stored(program: Program, names: Collection[str]) -> set[str]:
    return {program.values[name].storage for name in names}


def _peaks(program: Program, steps: Sequence[Step], totals: Collection[str]) -> tuple[int, int]:
    """The most bytes that are held at once, if the totals come to life on the way, and if they are there before."""
    none = {name: replace(program.values[name], shape=(0,) * len(program.values[name].shape)) for name in totals}
    ran = replace(program, steps=steps)
    return peak_bytes(ran), peak_bytes(replace(ran, values={**program.values, **none}))
