"""What a device holds while a Program runs: bytes of parameters, workspaces and what operators make, step by step."""

from __future__ import annotations

from .steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Program, WaitStep


def held_bytes(program: Program) -> list[int]:
    """The bytes of tiles that one device holds during each step, padding included; before the first one, inputs and
    outputs are there, but for outputs that operators make."""
    holder = _Holder(program)
    held = []
    for step in program.steps:
        _CHANGES[type(step)](holder, step)
        held.append(holder.now)
    return held


def peak_bytes(program: Program) -> int:
    """The most bytes that one device holds at once."""
    return max(held_bytes(program), default=_Holder(program).now)


class _Holder:
    """The storages that there are, and their bytes."""

    def __init__(self, program: Program) -> None:
        self._values = program.values
        self._sizes: dict[str, int] = {}
        for value in program.values.values():
            self._sizes[value.storage] = max(self._sizes.get(value.storage, 0), value.tile_bytes)
        made = {name for step in program.steps if isinstance(step, OpStep) for name in step.results}
        given = [p.input for p in program.parameters if p.input is not None]
        given += [p.output for p in program.parameters if p.output is not None and p.output not in made]
        self._there: set[str] = set()
        self.now = 0
        for name in given:
            self._add(program.values[name].storage)

    def make(self, step: OpStep) -> None:
        """Results come with their memory."""
        for name in step.results:
            self._add(self._values[name].storage)

    def alloc(self, step: AllocStep) -> None:
        """Memory that nobody brought."""
        self._add(step.value)

    def free(self, step: FreeStep) -> None:
        """The memory is gone."""
        if step.value in self._there:
            self._there.remove(step.value)
            self.now -= self._sizes[step.value]

    def nothing(self, step: object) -> None:
        """It works on what is there."""

    def _add(self, storage: str) -> None:
        if storage not in self._there:
            self._there.add(storage)
            self.now += self._sizes[storage]


_CHANGES = {
    OpStep: _Holder.make,
    AllocStep: _Holder.alloc,
    FreeStep: _Holder.free,
    KernelStep: _Holder.nothing,
    CollectiveStep: _Holder.nothing,
    WaitStep: _Holder.nothing,
}
