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
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import machine_named
from mesh_tensor.base.recent import uncollected
from mesh_tensor.lowering.pipeline import KernelLowering
from mesh_tensor.program.from_kernel import Lowering
from mesh_tensor.program.overlap import check_overlap
from mesh_tensor.program.program import Program
from mesh_tensor.program.symbolic import Programs
from mesh_tensor.rules.kernel.sharding_rule import sharding_rule
from mesh_tensor.runtime.ambient import is_plain, plain, refuse_traced, uncompiled, undisturbed
from mesh_tensor.runtime.ranks import are_current, is_dtensor, ranks_of
from mesh_tensor.runtime.ranks.rank_launch import Transfer
from mesh_tensor.targets.kernels import find_target
from mesh_tensor.tir.grids import grids_of

from .backward import Gradients, laid_out_alike
from .combinations import tried
from .compiled import Compiled, OutIdx, VirtualKernel, call_forms, given_out_idx, in_order, refuse_count
from .rank_kernel import RankKernel
from .rank_locals import Shapes
from .signature import Signature


@undisturbed
@uncollected
def compile(
    func: tirx.PrimFunc,
    target: str = "auto",
    out_idx: OutIdx = None,
    strict: bool = False,
    poison: bool = False,
    view: str = "auto",
    overlap: str | int = "auto",
    backward: tirx.PrimFunc | Sequence[tirx.PrimFunc] = (),
    machine: Machine | str | None = None,
) -> MeshKernel:
    """Make an annotated TileLang kernel callable on a virtual mesh.

    Args:
        func: the kernel over global tensors, annotated (`annotate`, or `annotate_mesh_tensor_info` inside it).
        target: `c`, `cuda`, `interpret`, or `auto` (`cuda` where there is a GPU, else `c`).
        out_idx: the parameters that calls allocate and return, as in `tilelang.compile`, by position or by name; None:
            those of the kernel's `tilelang_out_idx` attribute, if it has one, else those that the kernel writes.
        strict: refuse what needs replication or another layout than annotated, instead of moving data.
        poison: with target `interpret`, padding and uninitialised memory hold NaN or extreme integers.
        view: `global` for a kernel over global tensors, `local` for one over tiles, whose loops are sized with
            `get_tile_shape`; `auto` tells from the loops.
        overlap: overlap of collectives with kernels, which are split into slabs for it: `auto` leaves it to a cost
            model, `off` runs one step after the other, a number is the number of slabs wherever that is possible.
        backward: the kernels that compute the gradients, for torch.autograd. Their parameters are named as those of
            `func`; or `d_y`, which they read, the gradient with respect to the output y; or `d_x`, which they write,
            the gradient with respect to the input x. Buffers that they don't annotate have the layouts of `func`'s.
        machine: the Machine that the plan is optimized for, or a preset's name ("h100x16"); None: this project's CPU
            ranks.

    Returns:
        The kernel, lowered and compiled. A kernel with symbolic dims is compiled at its first call with sizes of each
        kind: multiples of its blocks, divided evenly by the mesh, or neither.

    Raises:
        MeshTensorError: what was asked for can't be done; the message says what, where, why and the way out.
    """
    lower = Lowering(KernelLowering(view, machine_named(machine)), strict)
    func = tried(check_kernel(func), view)
    kernels = (backward,) if isinstance(backward, tirx.PrimFunc) else tuple(backward)
    options: dict[str, Any] = {"target": target, "strict": strict, "poison": poison, "overlap": overlap}
    return MeshKernel(func, lower, out_idx=out_idx, backward=kernels, **options)


class MeshKernel:
    """A compiled kernel, as a callable. With global torch tensors or MeshTensors it runs on a virtual mesh; with
    DTensors on the ranks of their DeviceMesh; and `local` takes the local tensors of a rank.

    Called with the tensors that it reads, by position or by name, it returns those that it writes; elements of these
    that it doesn't write are 0. Called with all parameters, it writes into the tensors given, whose other elements stay
    as they are. Tensors that it both reads and writes are updated in place, and returned. If any argument is a
    MeshTensor, all results are MeshTensors in the annotated layouts.

    `gradients.kernels` are its compiled backward kernels, MeshKernels as well; without any, `gradients` is None."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        lower: Lowering,
        *,
        target: str,
        out_idx: OutIdx,
        strict: bool,
        poison: bool,
        overlap: str | int,
        backward: Sequence[tirx.PrimFunc] = (),
    ) -> None:
        options: dict[str, Any] = {"target": target, "strict": strict, "poison": poison, "overlap": overlap}
        self._made_of = check_kernel(func), lower, {**options, "out_idx": out_idx, "backward": tuple(backward)}
        on = find_target(target).remembering()
        if poison and on.name != "interpret":
            refuse(f"poison=True with target {on.name!r}", fix="use target='interpret'")
        self._signature = signature = Signature(func)
        programs = Programs(func, signature.symbols, lower, check_overlap(overlap), partial(on.compile, poison=poison))
        self._program = None if signature.symbols else programs.of({})
        self.mesh, stated = read_annotations(func) if self._program is None else (self._program.mesh, {})
        reads, writes = _roles_by_rule(func) if self._program is None else _roles(self._program)
        signature.read, signature.written = frozenset(reads), frozenset(writes)
        self._forms = call_forms(signature, given_out_idx(func, out_idx), signature.read, signature.written)
        layouts = {name: annotation.sharding for name, annotation in stated.items()}
        given = (strict, poison, overlap, layouts, signature.written)
        self._compiled = Compiled(signature, self.mesh, on, *given, programs, self._ran)
        self._virtual = VirtualKernel(self._compiled)
        self._on_ranks: dict[tuple[int, str], RankKernel] = {}
        self._last_on_ranks: tuple[Any, RankKernel] | None = None
        self._lock = threading.RLock()  # several threads may call
        self._transfers: Callable[[], list[Transfer]] = list
        kernels = [MeshKernel(laid_out_alike(func, part), lower, out_idx=None, **options) for part in backward]
        self.gradients = Gradients(signature, kernels) if kernels else None

    @property
    def program(self) -> Program:
        """The steps that every device runs; of a kernel with symbolic dims, for the sizes of the last call."""
        if self._program is None:
            names = ", ".join(self.symbols)
            refuse(
                f"kernel {self._signature.name!r} has no program yet: it has symbolic dims ({names})",
                fix="call it first; its program is then that of the sizes it was called with",
            )
        return self._program

    @property
    def signature(self) -> Signature:
        """The parameters, with their shapes and dtypes."""
        return self._signature

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of its symbolic dims."""
        return tuple(var.name for var in self._signature.symbols)

    @property
    def device(self) -> torch.device:
        """The torch device that arguments have to be on."""
        return self._compiled.target.device()

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tiles and workspaces that one device held at once in any call so far."""
        return self._virtual.peak_bytes

    def explain(self) -> str:
        """The plan as text: factors, placements, collectives with their bytes, the cost per device, and how the
        DTensors of the last call were redistributed into the annotated layouts."""
        from mesh_tensor.program.explain import explain

        from .compiled import notes_on

        return explain(self.program, *notes_on(self.program, self._compiled.target.name, self._transfers()))

    @uncompiled
    def __call__(self, /, *args: Any, **named: Any) -> Any:
        device_mesh = next((arg.device_mesh for arg in (*args, *named.values()) if is_dtensor(arg)), None)
        runner: VirtualKernel | RankKernel = self._virtual if device_mesh is None else self.on_ranks(device_mesh)
        return self._run(runner, runner, args, named)

    @uncompiled
    def local(self, *args: Any, device_mesh: Any = None, shapes: Shapes | None = None, **named: Any) -> Any:
        """Run on the ranks of a process group with this rank's local tensors: plain torch tensors, with the tile's
        padding or without. Collective.

        Args:
            args, named: as in a call, but each tensor is the local one of this rank.
            device_mesh: the ranks to run on; None: all ranks there are, in their order.
            shapes: for a kernel with symbolic dims: global shapes by the parameter's name. A size that they don't give
                is taken from a dim that is not split, or else such that all tiles are full.

        Returns:
            The local tensors of the results, without padding."""
        on_ranks = self.on_ranks(device_mesh)
        return self._run(on_ranks, on_ranks.local, args, named, shapes or {})

    def _run(
        self,
        runner: VirtualKernel | RankKernel,
        run: Callable[..., Sequence[Any]],
        args: tuple[Any, ...],
        named: dict[str, Any],
        *more: Any,
    ) -> Any:
        """Call `run` of `runner` on the arguments by parameter, the names of what is returned, and `more`."""
        undisturbed = is_plain()
        try:  # what is refused here counts as a call, as the others make one
            args = self._in_order(args, named) if named else args
            if not undisturbed:
                refuse_traced(f"kernel {self._signature.name!r}", args)
            form = self._forms.get(len(args)) or refuse_count(self._signature.name, len(args), self._forms)
            given = dict(zip(form.passed, args, strict=True))
            if self.gradients is not None and run is runner:
                run = self.gradients.around(run, given)
        except MeshTensorError as error:
            runner.refuse_call(error)
        if undisturbed:
            results = run(given, form.returned, *more)
        else:
            with plain():
                results = run(given, form.returned, *more)
        return results[0] if len(results) == 1 else tuple(results)

    def on_ranks(self, device_mesh: Any) -> RankKernel:
        """The kernel on the ranks of a DeviceMesh, or on all that there are, as this thread calls it."""
        last = self._last_on_ranks
        if last is not None and last[0] is device_mesh and are_current() and last[1].is_of_this_thread():
            return last[1]
        with self._lock:
            return self._new_on_ranks(device_mesh)

    def _new_on_ranks(self, device_mesh: Any) -> RankKernel:
        ranks = ranks_of(self.mesh, device_mesh, self._compiled.target.device_type)
        key = id(ranks), threading.current_thread().name
        found = self._on_ranks.get(key)
        if found is None or found.ranks is not ranks or not found.is_of_this_thread():
            kept = {key: kernel for key, kernel in self._on_ranks.items() if kernel.lane.is_current()}
            found = RankKernel(self._compiled, ranks)
            self._on_ranks = {**kept, key: found}
        self._last_on_ranks = device_mesh, found
        return found

    def _ran(self, program: Program, transfers: Callable[[], list[Transfer]]) -> None:
        """What is run depends on sizes; ranks may run another program than the virtual mesh, and their DTensors may
        need redistribution."""
        self._program, self._transfers = program, transfers

    def _in_order(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters."""
        params = [param.name for param in self._signature.params]
        return in_order(self._signature.name, params, args, named, self._forms)

    def __reduce__(self) -> tuple[Any, ...]:
        """Compiled again where it is loaded: what it was made of goes."""
        return _made_again, self._made_of

    def __repr__(self) -> str:
        names = ", ".join(param.name for param in self._signature.params)
        return f"MeshKernel({self._signature.name}({names}), {self.mesh}, target={self._compiled.target.name!r})"


def _made_again(func: tirx.PrimFunc, lower: Lowering, options: dict[str, Any]) -> MeshKernel:
    return MeshKernel(func, lower, **options)


def _roles(program: Program) -> tuple[list[str], list[str]]:
    """The parameters that a kernel reads, and those that it writes."""
    reads = [p.name for p in program.parameters if p.input is not None and not p.kept]
    return reads, [p.name for p in program.parameters if p.output is not None]


def _roles_by_rule(func: tirx.PrimFunc) -> tuple[list[str], list[str]]:
    reads, writes = dict[str, None](), dict[str, None]()
    grids = grids_of(func)
    for rule in map(sharding_rule, grids.funcs):
        reads |= dict.fromkeys(name for name in rule.inputs if name not in writes)
        writes |= dict.fromkeys(rule.outputs)
    own = {str(buffer.name) for buffer in grids.own}
    return [name for name in reads if name not in own], [name for name in writes if name not in own]
