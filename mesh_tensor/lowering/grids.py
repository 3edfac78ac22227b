"""Functions with several kernels: each is lowered alone, and takes what the ones before it left where that lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tvm import tirx

from mesh_tensor.annotations.annotate import TILES_ATTR, annotate, read_annotations
from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.tir.grids import Grids, zeros_like
from mesh_tensor.tir.nodes import function_name

from .local_view import Collective, LocalKernel, LocalView, Lowered, Tensor


@dataclass(frozen=True, eq=False)
class LoweredGrids(LocalView):
    """Several kernels in local view, as one: `grids` are the kernels alone; `why` they are several, where their author
    wrote one."""

    grids: tuple[Lowered, ...]
    why: str = ""

    def decisions(self) -> Decisions:
        """What was decided of each, for people."""
        each = [grid.decisions() for grid in self.grids]
        head = (f"{len(each)} kernels of {self.name} on {self.mesh}{self.why}",)
        sections = [section for found in each for section in (found.head, *found.sections)]
        notes = [note for found in each for note in found.notes]
        return Decisions(head, tuple(sections), tuple(notes), asked=self.asked)


def lower_grids(func: tirx.PrimFunc, grids: Grids, lower: Callable[[tirx.PrimFunc], Lowered]) -> LoweredGrids:
    """Lower each of an annotated function's kernels. What is not annotated stays as the kernel that made it left it.
    Refused where one can't be lowered, they are written over tiles, or one needs what was in memory of the function's
    own before any wrote to it. (What no kernel writes of it is 0.)"""
    name = function_name(func)
    mesh, annotations = read_annotations(func)
    if func.attrs and TILES_ATTR in func.attrs:
        refuse(
            f"function {name!r} has {len(grids.funcs)} kernels, and asks for tiles",
            why="several kernels in one function are read over whole tensors",
            fix="write them over whole tensors, or each in a function of its own",
        )
    asked = {param: annotation.sharding for param, annotation in annotations.items()}
    own = {str(buffer.name): buffer for buffer in grids.own}
    made = _Together(dict(asked)).filled(name, mesh, grids.funcs, lower)
    if unset := sorted(made.looked_at_first & own.keys()):
        refuse(
            [f"{param!r} is read before it has been written" for param in unset],
            where=f"function {name!r}",
            why="nobody says what is in it",
            fix="fill it in a T.Kernel of its own first, or make it a parameter",
        )
    if partly := sorted(own.keys() & made.inputs.keys()):  # what nobody writes is 0
        layouts = {param: made.layouts[param] for param in partly}
        zeros = [zeros_like(own[param]) for param in partly]
        made = _Together({**asked, **layouts}).filled(name, mesh, (*zeros, *grids.funcs), lower)
    buffers = [func.buffer_map[p] for p in func.params if p in func.buffer_map]
    for buffer in buffers:
        made.take(buffer, mesh)
    scalars = tuple(p for p in func.params if p not in func.buffer_map)
    params = [str(buffer.name) for buffer in buffers]
    parameters = tuple((p, made.inputs.get(p), made.written.get(p)) for p in params)
    return LoweredGrids(
        name,
        mesh,
        parameters,
        scalars,
        made.tensors,
        tuple(made.steps),
        asked,
        frozenset(made.inputs.keys() - made.looked_at),
        tuple(made.grids),
    )


@dataclass
class _Together:
    """The kernels so far. `layouts`: how parameters lie, as annotated or as they were left; `current`: the tensors that
    hold them; `inputs`, `written`: the tensors that come in, and that parameters leave in; `looked_at`: the inputs of
    which something is used, `looked_at_first` those of which that is before anything is written."""

    layouts: dict[str, Sharding]
    grids: list[Lowered] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: list[LocalKernel | Collective] = field(default_factory=list)
    current: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    looked_at: set[str] = field(default_factory=set)
    looked_at_first: set[str] = field(default_factory=set)

    def filled(
        self, name: str, mesh: Mesh, funcs: Sequence[tirx.PrimFunc], lower: Callable[[tirx.PrimFunc], Lowered]
    ) -> _Together:
        """With all kernels of a function."""
        for number, func in enumerate(funcs):
            bare = func.with_attr("global_symbol", f"{name}_{number}")
            names = {str(buffer.name) for buffer in func.buffer_map.values()}
            self.add(lower(annotate(bare, mesh, {p: layout for p, layout in self.layouts.items() if p in names})))
        return self

    def add(self, lowered: Lowered) -> None:
        """One more kernel: its tensors get names of their own, but for those that are there already."""
        self.grids.append(lowered)
        names, storages = dict[str, str](), dict[str, str]()
        for param, given, _ in lowered.parameters:
            if given is None:
                continue
            if param not in lowered.kept:
                self.looked_at.add(param)
                self.looked_at_first |= {param} - self.current.keys()
            if param in self.current:
                names[given] = self.current[param]
                storages[lowered.tensors[given].storage] = self.tensors[self.current[param]].storage
        for old, tensor in lowered.tensors.items():
            if old not in names:
                storage = storages.setdefault(tensor.storage, self._fresh(tensor.storage))
                names[old] = self._fresh(old)
                self.tensors[names[old]] = replace(tensor, name=names[old], storage=storage)
        self.steps += [step.renamed(names) for step in lowered.steps]
        for param, given, left in lowered.parameters:
            if given is not None and param not in self.current:
                self.inputs[param] = self.current[param] = names[given]
            if left is not None:
                self.written[param] = self.current[param] = names[left]
            self.layouts.setdefault(param, self.tensors[self.current[param]].sharding)

    def take(self, buffer: tirx.Buffer, mesh: Mesh) -> None:
        """A parameter, which comes in even if no kernel uses it."""
        param = str(buffer.name)
        if param in self.current:
            return
        layout, name = self.layouts.get(param, Sharding.make(mesh, len(buffer.shape))), self._fresh(param)
        self.tensors[name] = Tensor(name, tuple(buffer.shape), str(buffer.dtype), layout, name)
        self.inputs[param] = self.current[param] = name
        self.looked_at.add(param)

    def _fresh(self, name: str) -> str:
        used = {*self.tensors, *(tensor.storage for tensor in self.tensors.values())}
        count, fresh = 0, name
        while fresh in used:
            count += 1
            fresh = f"{name.split('.')[0]}.{count}"
        return fresh
