"""RankKernel: a compiled kernel on the ranks of a process group, called with DTensors or with local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.overlap import with_overlap_on
from mesh_tensor.program.program import Program
from mesh_tensor.runtime.ambient import fix_of, is_dual, may_be_dual, overlaps
from mesh_tensor.runtime.ranks.alike import told
from mesh_tensor.runtime.ranks.dtensor import PART_FIX, from_placements, is_dtensor, lies_like_torch, part_problem
from mesh_tensor.runtime.ranks.faults import Faults, agree, digest_of, program_facts
from mesh_tensor.runtime.ranks.rank_backend import RankBackend
from mesh_tensor.runtime.ranks.rank_launch import RankLaunch, enter, leave, transfers
from mesh_tensor.runtime.ranks.ranks import Ranks
from mesh_tensor.runtime.ranks.tiling import Tiling, tilings_of

from .compiled import Compiled
from .rank_locals import Shapes, global_sizes, guesses, problem, said_key, shares_memory
from .signature import Sizes, check_layouts

_REDISTRIBUTE = "redistribute the DTensor so, or compile without strict=True"
_SAY_SHAPES = "; of uneven local tensors, say the whole shapes: local(..., shapes=...)"
_Checked = tuple[Sizes, dict[str, Sharding], bool]  # sizes, how DTensors lie, and whether the caller said all sizes


@dataclass(frozen=True)
class _Run:
    """A launch for the sizes `key`, and how the DTensors for it lie. `alone`: nothing is exchanged, nobody waits;
    `digest`: what tells what it exchanges from every other run, if it exchanges something; `guessed`: for uneven tiles
    ranks take other sizes, which they find out together at every call."""

    key: tuple[int, ...]
    launch: RankLaunch
    layouts: dict[str, Sharding]
    alone: bool
    digest: int
    guessed: bool


class RankKernel:
    """The kernel on `ranks`, as one thread calls it. Every rank has to make the same calls."""

    def __init__(self, compiled: Compiled, ranks: Ranks) -> None:
        self._compiled, self.ranks, self.lane = compiled, ranks, ranks.calls.lane()
        self._signature, self._device = compiled.signature, compiled.target.device()
        self._faults, self._name = Faults(ranks, compiled.signature.name), self.lane.named(compiled.signature.name)
        self._launches: Recent[tuple[int, ...], RankLaunch] = Recent(KERNEL_SIZES)
        self._facts: Recent[tuple[int, ...], dict[str, str]] = Recent(KERNEL_SIZES)
        symbols = set(self._signature.symbols)
        self._size_names = {p.name for p in self._signature.params if not p.is_tensor and p.var in symbols}
        self._runs: Recent[tuple, _Run] = Recent(KERNEL_SIZES)
        self._last: tuple[tuple, _Run | None] = ((), None)  # what was checked last
        self._agreed: _Run | None = None  # what the last call ran

    def __call__(self, given: Mapping[str, Any], returned: Sequence[str]) -> list[Any]:
        """Run on DTensors; the written parameters `returned`, as DTensors that lie as annotated, or as what was
        passed."""
        recorded = torch.is_grad_enabled()
        with self.lane, torch.no_grad():
            self.lane.kernel = self._name
            key = self._key(given, recorded)
            run = self._known(key) or self._checked(key, lambda: self._check_dtensors(given, recorded))
            scalars = self._signature.scalars(given)
            self._begin(run, scalars)
            launch, layouts = run.launch, run.layouts
            self._compiled.ran(launch.program, partial(transfers, launch, layouts, returned))
            tensors = {name: given[name] for name in layouts}
            locals_ = {name: enter(launch, name, tensor, layouts[name]) for name, tensor in tensors.items()}
            results = launch(locals_, scalars, self._entangled(locals_))
            return [leave(launch, name, tensors.get(name), layouts.get(name), results[name]) for name in returned]

    def local(self, given: Mapping[str, Any], returned: Sequence[str], shapes: Shapes) -> list[torch.Tensor]:
        """Run on this rank's local tensors: valid parts, or whole tiles. `shapes`: global ones, where they are said."""
        with self.lane:
            self.lane.kernel = self._name
            key = ("local", said_key(shapes) if shapes else "", *self._key(given, torch.is_grad_enabled()))
            run = self._known(key)
            if run is None:
                guessed = bool(self._signature.symbols) and guesses(
                    self._signature, self._compiled.layouts, given, shapes
                )
                run = self._checked(key, lambda: self._check_locals(given, shapes), guessed)
            launch = run.launch
            scalars = self._signature.scalars(given)
            self._begin(run, scalars)
            self._compiled.ran(launch.program, list)
            locals_ = {name: given[name] for name in launch.tilings if name in given}
            entangled = len(locals_) > launch.inputs and self._entangled(locals_)
            results = launch(locals_, scalars, entangled)
            return [given.get(name, results[name]) for name in returned]

    def _begin(self, run: _Run, scalars: Mapping[str, int | float]) -> None:
        if run.digest:
            self.lane.run(run.digest, told(scalars) if scalars else None)
        else:
            self.lane.alone = True

    def is_of_this_thread(self) -> bool:
        """Whether this thread made it, and what the ranks agreed on still holds."""
        return not self.ranks.is_gone() and self.ranks.calls.lane() is self.lane

    def refuse_call(self, error: Exception) -> NoReturn:
        """Raise `error` instead of a call."""
        with self.lane:
            self.lane.kernel = self._name
            self._refuse(error)

    def _refuse(self, error: Exception, guessed: bool = False) -> NoReturn:
        """Raise. Where the others are about to agree, they hear of it there."""
        if self._agreed is None or guessed:
            agree(self.ranks, self._faults, {}, refusal=str(error))
        self.lane.alone = self._agreed is not None and not self._agreed.digest
        raise error

    def _known(self, key: tuple) -> _Run | None:
        """What arguments like those with the same key run, if that needs no checks: they were checked, and it ran
        last, or by itself."""
        if key != self._last[0]:
            self._last = key, self._runs.get(key)
        run = self._last[1]
        return None if run is None or run.guessed or not (run.alone or run is self._agreed) else run

    def _checked(self, key: tuple, check: Callable[[], _Checked], guessed: bool = False) -> _Run:
        """What arguments with that key run: checked, and agreed on unless it ran last."""
        run = self._runs.put(key, self._ready(check, guessed))
        self._last = key, run
        return run

    def _key(self, given: Mapping[str, Any], recorded: bool) -> tuple:
        """All of the arguments that checks look at; `recorded`: gradients that they require would be lost."""
        found: list[object] = []
        dual = may_be_dual()
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                places = value.stride() if value.layout is torch.strided else value.layout
                lost = (recorded and value.requires_grad) or (dual and is_dual(value))
                found += (name, type(value), value.shape, value.dtype, value.device, places, lost)
                if is_dtensor(value):
                    part = value.to_local().shape
                    found += (value.placements, value.device_mesh == self.ranks.device_mesh, part)
            else:
                found += (name, type(value), value if name in self._size_names else None)
        return (*found, bool(self._signature.wrong_scalars(given)))

    def _ready(self, check: Callable[[], _Checked], guessed: bool) -> _Run:
        """The launch for these arguments, and how they lie. Unless that is as at the last call, the ranks agree on
        it; once they have the same kernel, they needn't where the caller says all sizes and nothing is exchanged."""
        try:
            sizes, layouts, said = check()
            key = tuple(sizes[var] for var in self._signature.symbols)
            launch, program = self._launches.get(key), self._compiled.programs.of(sizes)
            if self._compiled.strict:
                check_layouts(layouts, program, self._where(), _REDISTRIBUTE)
        except Exception as error:
            self._refuse(error, guessed)
        agreed = self._agreed
        if not guessed and agreed is not None and agreed.key == key and agreed.layouts == layouts:
            if agreed.guessed:
                agreed = self._agreed = replace(agreed, guessed=False)
            return agreed
        exchanges = _exchanges(program, layouts)
        alone = agreed is not None and said and not exchanges
        digest = 0 if alone else self._agree(key, program, layouts) * exchanges
        if launch is None:
            launch = self._launches.put(key, self._make(program, sizes))
        run = _Run(key, launch, layouts, alone, digest, guessed)
        if not alone:
            self._agreed = run
        return run

    def _agree(self, key: tuple[int, ...], program: Program, layouts: Mapping[str, Sharding]) -> int:
        """All ranks run this; the digest of it."""
        compiled = self._compiled
        facts = self._facts.made(key, lambda: program_facts(program, compiled.target.name, compiled.overlap))
        arguments = ", ".join(f"{name} '{layout}'" for name, layout in layouts.items())
        facts = {**facts, "layouts of the arguments": arguments}
        agree(self.ranks, self._faults, facts, fix=_SAY_SHAPES if key and not layouts else "")
        return digest_of(facts)

    def _make(self, program: Program, sizes: Sizes) -> RankLaunch:
        compiled = self._compiled
        if compiled.overlap == "auto":
            exactly = partial(compiled.programs.exact, sizes) if sizes else None
            program = with_overlap_on(lambda: self.ranks.machine(), program, exactly)
        self.lane.doing = "making the kernel ready"
        return RankLaunch(RankBackend(program, compiled.target, self.ranks, self._faults, poison=compiled.poison))

    def _check_dtensors(self, given: Mapping[str, Any], recorded: bool) -> _Checked:
        tensors = {name: value for name, value in given.items() if name in self._signature.tensors}
        problems = [
            f"parameter {name!r}: a {type(value).__name__}, but other parameters are DTensors"
            if not is_dtensor(value)
            else f"parameter {name!r}: {self.ranks.elsewhere(value)}"
            for name, value in tensors.items()
            if not is_dtensor(value) or self.ranks.elsewhere(value)
        ]
        if problems:
            fix = "pass DTensors of one DeviceMesh (torch.distributed.tensor.distribute_tensor makes them)"
            refuse(problems, where=self._where(), fix=fix)
        mesh, rank = self.ranks.mesh, self.ranks.rank
        with torch.set_grad_enabled(recorded):
            sizes = self._signature.check(given, mesh, self._device)
        layouts = {name: from_placements(mesh, t.ndim, t.placements) for name, t in tensors.items()}
        parts = {name: part_problem(tensor, layouts[name], rank) for name, tensor in tensors.items()}
        problems = [f"parameter {name!r}: {words}" for name, words in parts.items() if words]
        if problems:
            refuse(problems, where=self._where(), fix=PART_FIX)
        return sizes, layouts, True

    def _check_locals(self, given: Mapping[str, Any], shapes: Shapes) -> _Checked:
        sizes, said = global_sizes(self._signature, self._compiled.layouts, given, shapes, self._where())
        program = self._compiled.programs.of(sizes)
        problems = self._problems(tilings_of(program, self.ranks.rank), given)
        written = [p.name for p in program.parameters if p.output is not None]
        problems += [f"parameter {n!r}: {words}" for n in written if (words := shares_memory(given.get(n)))]
        fix = fix_of(
            problems, given.values(), "pass this rank's part of every tensor, or its whole tile, padding included"
        )
        wrong = [(fact, fix) for fact in problems] + self._signature.wrong_scalars(given)
        if wrong:
            fixes = "; ".join(dict.fromkeys(fix for _, fix in wrong))
            refuse([fact for fact, _ in wrong], where=self._where(), fix=fixes)
        return sizes, {}, said

    def _problems(self, tilings: Mapping[str, Tiling], given: Mapping[str, Any]) -> list[str]:
        found = {name: problem(tilings[name], self._device, given[name]) for name in tilings if name in given}
        return [f"parameter {name!r}: {words}" for name, words in found.items() if words]

    def _entangled(self, tensors: Mapping[str, torch.Tensor | None]) -> bool:
        """Some of them that are written overlap in memory with others."""
        given = {name: (tensor,) for name, tensor in tensors.items() if tensor is not None}
        return overlaps(given, self._compiled.writes, self._where())

    def _where(self) -> str:
        return f"call of kernel {self._signature.name!r} on {self.ranks.mesh}"


def _exchanges(program: Program, layouts: Mapping[str, Sharding]) -> bool:
    """Whether ranks exchange anything: in the program, or because DTensors lie otherwise than it takes and makes
    them."""
    if program.collectives:
        return True
    for parameter in program.parameters if layouts else ():
        value = program.values[str(parameter.input or parameter.output)]
        layout = layouts.get(parameter.name, value.sharding)
        if layout != value.sharding or not lies_like_torch(layout, value.shape):
            return True
    return False
