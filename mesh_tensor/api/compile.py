"""compile: from an annotated kernel in global view to a MeshKernel, which is called with tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.lowering.pipeline import KernelLowering
from mesh_tensor.program.overlap import check_overlap
from mesh_tensor.program.steps import Program
from mesh_tensor.program.symbolic import Lower, Programs
from mesh_tensor.rules.kernel.sharding_rule import sharding_rule
from mesh_tensor.runtime.ambient import is_plain, plain, undisturbed
from mesh_tensor.runtime.plain_tensors import refuse_traced
from mesh_tensor.runtime.ranks import are_current, is_dtensor, ranks_of
from mesh_tensor.runtime.ranks.dtensor_ports import Transfer
from mesh_tensor.runtime.virtual.launch import AnyTensor, Launch, entangled
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.kernels import find_target

from .call_checks import check_placements, is_quick
from .call_forms import CallForm, OutIdx, call_forms, given_out_idx, in_order, refuse_count
from .rank_kernel import Compiled, RankKernel
from .rank_locals import Shapes
from .signature import Signature, Sizes


@undisturbed
def compile(
    func: tirx.PrimFunc,
    target: str = "auto",
    out_idx: OutIdx = None,
    strict: bool = False,
    poison: bool = False,
    view: str = "auto",
    overlap: str | int = "auto",
) -> MeshKernel:
    """Make an annotated TileLang kernel callable on a virtual mesh.

    Args:
        func: the kernel over whole tensors, annotated (`annotate`, or `annotate_mesh_tensor_info` inside it).
        target: `c`, `cuda`, `interpret`, or `auto` (`cuda` where there is a GPU, else `c`).
        out_idx: which parameters are made and returned at a call, as in `tilelang.compile`, by position or by name;
            None goes by the kernel's `tilelang_out_idx` attribute, if it has one, else by what the kernel writes.
        strict: refuse what needs replication or another layout than annotated, instead of moving data.
        poison: with target `interpret`, padding and uninitialised memory hold NaN or extreme integers.
        view: `global` for a kernel over whole tensors, `local` for one that sizes its loops with `get_tile_shape`,
            `auto` to see it from the loops.
        overlap: whether collectives run beside kernels, slab by slab: `auto` leaves it to a cost model, `off` runs
            everything in bulk, a number is into how many slabs a kernel is split wherever that can be done.

    Returns:
        The kernel. It is lowered and compiled here; a kernel with symbolic dims is at its first call with sizes of a
        new kind: multiples of its blocks, even on the mesh, or neither.

    Raises:
        MeshTensorError: what was asked for can't be done; the message says what, where, why and the way out.
    """
    lower = KernelLowering(view)
    return MeshKernel(func, target=target, out_idx=out_idx, strict=strict, poison=poison, overlap=overlap, lower=lower)


class MeshKernel:
    """A kernel on a virtual mesh: takes global torch tensors and MeshTensors. On the ranks of a DeviceMesh: takes
    DTensors, and `local` takes local tensors.

    Called with the tensors that it reads, by position or by name, it returns those that it writes; called with all
    parameters, it writes into the tensors given (what it does not write stays as it is; in a tensor that it makes, that
    is 0). What it both reads and writes is updated in place, and returned. If any argument is a MeshTensor, all results
    are MeshTensors, laid out as annotated."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        *,
        target: str = "auto",
        out_idx: OutIdx = None,
        strict: bool = False,
        poison: bool = False,
        overlap: str | int = "auto",
        lower: Lower | None = None,
    ) -> None:
        self._func, self._strict, self._poison = check_kernel(func), strict, poison
        options = {"target": target, "out_idx": out_idx, "strict": strict, "poison": poison, "overlap": overlap}
        self._options: dict[str, Any] = {**options, "lower": lower}
        self._target = find_target(target).remembering()
        self._device = self._target.device()
        if poison and self._target.name != "interpret":
            refuse(f"poison=True with target {self._target.name!r}", fix="use target='interpret'")
        self._overlap = check_overlap(overlap)
        self._signature = Signature(func)
        self._launches: Recent[tuple[int, ...], Launch] = Recent(KERNEL_SIZES)
        self._peak_bytes = 0  # of calls whose launches are not kept any more
        compile_kernel = partial(self._target.compile, poison=poison)
        lower = lower or KernelLowering()
        self._programs = Programs(func, self._signature.symbols, lower, strict, overlap, compile_kernel)
        self._program: Program | None = None
        self._current: Launch | None = None
        self._on_ranks: dict[tuple[int, str], RankKernel] = {}
        self._lock = threading.RLock()  # several threads may call
        self._last_on_ranks: tuple[Any, RankKernel] | None = None
        self._transfers: Callable[[], list[Transfer]] = list
        if self._signature.symbols:
            self.mesh: Mesh = read_annotations(func)[0]
            reads, writes = _roles_by_rule(func)
        else:
            self._current = self._make({})
            self.mesh = self._current.program.mesh
            parameters = self._current.program.parameters
            reads = [p.name for p in parameters if p.input is not None and not p.kept]
            writes = [p.name for p in parameters if p.output is not None]
        self._writes = frozenset(writes)
        self._signature.written = self._writes
        self._forms = call_forms(self._signature, given_out_idx(func, out_idx), frozenset(reads), self._writes)
        self._quick = [] if self._signature.symbols else self._quick_checks()
        self._can_be_quick = len(self._signature.params) == len(self._quick)

    @property
    def program(self) -> Program:
        """The steps. Of a kernel with symbolic dims: those for the sizes of the last call."""
        if self._program is None:
            names = ", ".join(self.symbols)
            refuse(
                f"kernel {self._signature.name!r} has no program yet: it has symbolic dims ({names})",
                fix="call it first; its program is then that of the sizes it was called with",
            )
        return self._program

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of its symbolic dims."""
        return tuple(var.name for var in self._signature.symbols)

    @property
    def device(self) -> torch.device:
        """The torch device that tensors have to be on."""
        return self._device

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device held at once, in tiles and workspaces, in any call so far."""
        return max(self._peak_bytes, *(launch.peak_bytes for launch in (*self._launches, self._current) if launch), 0)

    def explain(self) -> str:
        """Factors, placements, collectives with their bytes, what the DTensors of the last call needed to lie as
        annotated, and the cost per device, as text."""
        from mesh_tensor.program.explain import explain

        from .kernel_notes import notes_on

        return explain(self.program, *notes_on(self.program, self._target.name, self._transfers()))

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        device_mesh = next((arg.device_mesh for arg in (*args, *named.values()) if is_dtensor(arg)), None)
        if device_mesh is not None:
            on_ranks = self.on_ranks(device_mesh)
            return self._on_ranks_as(on_ranks, args, named, lambda given, form: on_ranks(given, form.returned))
        if named:
            args = self._in_order(args, named)
        if is_plain():
            return self._call(args)
        refuse_traced(f"kernel {self._signature.name!r}", args)
        with plain():
            return self._call(args)

    def _call(self, args: tuple[Any, ...]) -> Any:
        form = self._forms.get(len(args)) or refuse_count(self._signature.name, len(args), self._forms)
        given = dict(zip(form.passed, args, strict=True))
        launch = self._current
        if self._signature.symbols or not (self._can_be_quick and is_quick(self._quick, given, self._device)):
            launch = self._launch_for(given)
        assert launch is not None
        as_mesh_tensors = any(isinstance(arg, MeshTensor) for arg in args)
        tensors: dict[str, AnyTensor | None] = {name: given.get(name) for name in self._signature.tensors}
        for parameter in launch.program.parameters:
            if parameter.input is not None and tensors[parameter.name] is None:
                tensors[parameter.name] = launch.zeros(parameter, as_mesh_tensors)
        results = launch(
            tensors,
            self._signature.scalars(given),
            as_mesh_tensors=as_mesh_tensors,
            entangled=entangled(tensors, self._writes),
        )
        returned = [self._result(given.get(name), results[name]) for name in form.returned]
        return _unpacked(returned)

    def local(self, *args: Any, device_mesh: Any = None, shapes: Shapes | None = None, **named: Any) -> Any:
        """Run as this rank of a process group, on its parts of the tensors: plain tensors, without padding or whole
        tiles.

        Args:
            args, named: as in a call, but each tensor is what this rank holds of it.
            device_mesh: the ranks to run on; None: all ranks there are, in their order.
            shapes: for a kernel with symbolic dims: shapes of whole tensors, by parameter's name. Sizes that they don't
                tell are those of dims that are not split, or else those that make the tiles even.

        Returns:
            This rank's parts of the results, without padding."""
        on_ranks = self.on_ranks(device_mesh)
        said = shapes or {}
        return self._on_ranks_as(on_ranks, args, named, lambda given, form: on_ranks.local(given, form.returned, said))

    def _on_ranks_as(
        self,
        on_ranks: RankKernel,
        args: tuple[Any, ...],
        named: dict[str, Any],
        run: Callable[[dict[str, Any], CallForm], list[Any]],
    ) -> Any:
        try:  # what is refused here counts as a call, as the others make one
            args = self._in_order(args, named) if named else args
            if not is_plain():
                refuse_traced(f"kernel {self._signature.name!r}", args)
            form = self._forms.get(len(args)) or refuse_count(self._signature.name, len(args), self._forms)
        except MeshTensorError as error:
            on_ranks.refuse_call(error)
        given = dict(zip(form.passed, args, strict=True))
        if is_plain():
            return _unpacked(run(given, form))
        with plain():
            return _unpacked(run(given, form))

    def on_ranks(self, device_mesh: Any) -> RankKernel:
        """The kernel on the ranks of a DeviceMesh, or on all that there are, as this thread calls it."""
        last = self._last_on_ranks
        if last is not None and last[0] is device_mesh and are_current() and last[1].is_of_this_thread():
            return last[1]
        with self._lock:
            return self._new_on_ranks(device_mesh)

    def _new_on_ranks(self, device_mesh: Any) -> RankKernel:
        ranks = ranks_of(self.mesh, device_mesh, self._target.device_type)
        key = id(ranks), threading.current_thread().name
        found = self._on_ranks.get(key)
        if found is None or found.ranks is not ranks or not found.is_of_this_thread():
            kept = {key: kernel for key, kernel in self._on_ranks.items() if kernel.lane.is_current()}
            options = (self._strict, self._poison, self._overlap)
            stated = read_annotations(self._func)[1] if self._signature.symbols else {}
            layouts = {name: annotation.sharding for name, annotation in stated.items()}
            programs = (self._program_of, self._programs.exact)
            compiled = Compiled(self._signature, self._target, *options, layouts, *programs, self._ran)
            found = RankKernel(compiled, ranks)
            self._on_ranks = {**kept, key: found}
        self._last_on_ranks = device_mesh, found
        return found

    @staticmethod
    def _result(given: Any, result: AnyTensor) -> AnyTensor:
        """The very tensor that was passed, where the result is in it."""
        return given if isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor) else result

    def _launch_for(self, given: dict[str, Any]) -> Launch:
        """Check the arguments; the launch for their sizes."""
        sizes = self._signature.check(given, self.mesh, self._device)
        if self._signature.symbols:
            key = tuple(sizes[var] for var in self._signature.symbols)
            launch = self._launches.get(key)
            if launch is None:
                self._peak_bytes = self.peak_bytes
                launch = self._launches.put(key, self._make(sizes))
            self._current = launch
            self._program = launch.program
        else:
            launch = self._current
        assert launch is not None
        self._check_placements(given, launch.program)
        return launch

    def _check_placements(self, given: dict[str, Any], program: Program) -> None:
        if self._strict:
            check_placements(self._signature.name, given, program)

    def _make(self, sizes: Sizes) -> Launch:
        return Launch(self._program_of(sizes), self._target, poison=self._poison)

    def _program_of(self, sizes: Sizes) -> Program:
        """The program for these sizes."""
        with self._lock:
            self._program = self._programs.of(sizes)
            return self._program

    def _ran(self, program: Program, transfers: Callable[[], list[Transfer]]) -> None:
        """Ranks may run another program than the virtual mesh, and their DTensors may need redistribution."""
        self._program, self._transfers = program, transfers

    def _quick_checks(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        launch = self._current
        assert launch is not None
        return [(name, torch.Size(shape), dtype) for name, shape, dtype in launch.tensor_types()]

    def _in_order(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters."""
        params = [param.name for param in self._signature.params]
        return in_order(self._signature.name, params, args, named, self._forms)

    def __reduce__(self) -> tuple[Any, ...]:
        """Compiled again where it is loaded: what it was made of goes."""
        return _made_again, (self._func, self._options)

    def __repr__(self) -> str:
        names = ", ".join(param.name for param in self._signature.params)
        return f"MeshKernel({self._signature.name}({names}), {self.mesh}, target={self._target.name!r})"


def _made_again(func: tirx.PrimFunc, options: dict[str, Any]) -> MeshKernel:
    return MeshKernel(func, **options)


def _unpacked(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _roles_by_rule(func: tirx.PrimFunc) -> tuple[list[str], list[str]]:
    rule = sharding_rule(func)
    return list(rule.inputs), list(rule.outputs)
