"""Make every layout change explicit: which tensor lies how, and the collectives between the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.window import Window
from mesh_tensor.plan.one_kernel import Assignment
from mesh_tensor.redistribution.plan import Move, plan_moves
from mesh_tensor.rules.kernel.sharding_rule import sharding_rule_of
from mesh_tensor.rules.kernel.statements import ALL_TURNS, TURN, buffer_params
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.nodes import int_or

from .local_view import Collective, InTurns, LocalKernel, Lowered, Tensor
from .original_dims import with_original_dims
from .stages import LocalPart, LocalParts, Parts, Shape

_UNKNOWN = 1024  # times the number of devices: an unknown size counts as large, and as one that all axes divide


def explicit(local: LocalParts) -> Lowered:
    """The kernel with every change of layout as a collective, before, between and after its parts."""
    cut, ruled, kernel = local.cut, local.cut.ruled, local.cut.ruled.kernel
    func, analysis = ruled.refined.func, ruled.analysis
    layouts = _Layouts(local)
    for part in local.parts:
        layouts.add(part)
    layouts.finish()
    return Lowered(
        kernel.name,
        kernel.mesh,
        layouts.parameters(),
        tuple(p for p in func.params if p not in func.buffer_map),
        layouts.tensors,
        tuple(layouts.steps),
        kernel.asked,
        frozenset(p for p in analysis.kernel.params if analysis.only_kept(p)),
        func,
        sharding_rule_of(analysis, ruled.refined),
        cut.decided,
        cut.decided.whole,
        kernel.reading,
        _in_turns(cut),
    )


def _in_turns(cut: Parts) -> tuple[InTurns, ...]:
    """The loops that devices run one after the other."""
    found: dict[tirx.Var, InTurns] = {}
    for part in cut.parts:
        for factor, reduction in part.analysis.reductions.items():
            axes = tuple(axis for axis in part.assignment.axes_of(factor) if cut.ruled.kernel.mesh.size(axis) > 1)
            for scan in reduction.scans if axes else ():
                node = scan.loop.node
                if node is not None and int(node.annotations.get(TURN, ALL_TURNS)) != ALL_TURNS:
                    states = tuple(str(state.held.buffer.name) for state in scan.carried if state.copied is None)
                    found[scan.loop.var] = InTurns(scan.loop.var.name, states, axes, is_backward(node))
    return tuple(found.values())


class _Layouts:
    """Follows every parameter and workspace through the kernels, and inserts what changes their layout."""

    def __init__(self, local: LocalParts):
        ruled = local.cut.ruled
        self.asked, self.over_tiles, self.refined = ruled.kernel.asked, ruled.kernel.reading.over_tiles, ruled.refined
        self.shapes: Mapping[str, Shape] = {**local.cut.shapes, **ruled.kernel.shapes}
        self.mesh, self.params = ruled.kernel.mesh, buffer_params(ruled.refined.func)
        self.tensors: dict[str, Tensor] = {}
        self.steps: list[LocalKernel | Collective] = []
        self.current: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.written: set[str] = set()
        self.copies: dict[tuple[str, Sharding], str] = {}

    def add(self, local: LocalPart) -> None:
        """The part's kernel, after what brings its inputs into the layouts that it needs."""
        analysis, args, writes = local.part.analysis, list[str](), list[str]()
        assignment = with_original_dims(self.refined, local.part.assignment)
        for param, buffer in analysis.kernel.params.items():
            read = written = None
            if param in assignment.needed:
                in_out = param in assignment.produced
                read = self._read(param, buffer, assignment.needed[param], in_out, assignment)
            if param in assignment.produced:
                written = self._write(param, buffer, assignment.produced[param], read)
                writes.append(written)
            args.append(str(written or read))
        decided = (analysis, assignment, local.splits, self.over_tiles, bool(self.refined.groups))
        self.steps.append(LocalKernel(local.func, tuple(args), local.axes, tuple(writes), *decided))

    def finish(self) -> None:
        """Bring the outputs into the annotated layouts; what nothing annotates is left as it is, but complete. What no
        part uses comes in as it is."""
        for param, buffer in self.params.items():
            if param not in self.current:
                self._declare_input(param, buffer, Sharding.make(self.mesh, len(self.shapes[param])))
            if param not in self.written:
                continue
            now = self.tensors[self.current[param]]
            wanted = self.asked.get(param, now.sharding.complete)
            self.current[param] = self._reshard(now, wanted, "the output's layout").name

    def parameters(self) -> tuple[tuple[str, str | None, str | None], ...]:
        return tuple(
            (param, self.inputs.get(param), self.current[param] if param in self.written else None)
            for param in self.params
        )

    def _read(self, param: str, buffer: tirx.Buffer, needed: Sharding, in_out: bool, assignment: Assignment) -> str:
        if param not in self.current:
            self._declare_input(param, buffer, needed)
        now = self.tensors[self.current[param]]
        known = self.copies.get((now.name, needed))
        if known is not None and not in_out:
            return known
        result = self._reshard(now, needed, self._why(param, now.sharding, needed, assignment))
        if not in_out:
            self.copies[(now.name, needed)] = result.name
        return result.name

    def _declare_input(self, param: str, buffer: tirx.Buffer, needed: Sharding) -> None:
        """An input that nothing annotates comes in as it is needed; a partial start comes in complete."""
        layout = self.asked.get(param, needed.complete)
        self._add(Tensor(param, self.shapes[param], buffer.dtype, layout, param))
        self.current[param] = self.inputs[param] = param

    def _write(self, param: str, buffer: tirx.Buffer, produced: Sharding, read: str | None) -> str:
        before = None if read is None else self.tensors[read]
        if param in self.params:
            self.written.add(param)
        if before is not None:
            self.copies = {key: copy for key, copy in self.copies.items() if key[0] != before.name}
        if before is not None and before.sharding == produced:
            self.current[param] = before.name
            return before.name
        name = self._fresh(param)
        storage = name if before is None else before.storage
        self._add(Tensor(name, self.shapes[param], buffer.dtype, produced, storage))
        self.current[param] = name
        return name

    def _reshard(self, now: Tensor, wanted: Sharding, reason: str) -> Tensor:
        for move in plan_for(now.sharding, wanted, now.shape):
            name = self._fresh(now.name.split(".")[0])
            in_place = COLLECTIVES[move.kind].works_in_place and now.storage not in self.inputs
            storage = now.storage if in_place else name
            after = Tensor(name, now.shape, now.dtype, move.after, storage)
            self._add(after)
            self.steps.append(Collective(move, now.name, after.name, reason))
            if in_place:
                self.current = {p: after.name if name == now.name else name for p, name in self.current.items()}
            now = after
        return now

    def _why(self, param: str, now: Sharding, needed: Sharding, assignment: Assignment) -> str:
        if near := [str(dim) for dim, window in needed.windows if window.stride]:
            return f"what is next to tiles is read along dim {', '.join(near)}"
        if needed.blocks:
            return " and ".join(f"tiles of dim {dim} are whole blocks of {block}" for dim, block in needed.blocks)
        if needed.windows:
            return " and ".join(f"of dim {dim} only {_places(window)} is read" for dim, window in needed.windows)
        for dim, axes in enumerate(now.dims):
            for axis in axes:
                if needed.dim_of(axis) == dim:
                    continue
                if (param, dim) in assignment.whole:
                    return f"dim {dim} is needed whole: {assignment.whole[(param, dim)]}"
                return f"axis {axis!r} is used otherwise: {assignment.reasons[axis]}"
        return "partial values are completed" if now.partial else "the kernel works on tiles of it"

    def _fresh(self, name: str) -> str:
        if name not in self.tensors:
            return name
        count = 1
        while f"{name}.{count}" in self.tensors:
            count += 1
        return f"{name}.{count}"

    def _add(self, tensor: Tensor) -> None:
        self.tensors[tensor.name] = tensor


def _places(window: Window) -> str:
    last = window.first + window.length - 1
    return str(last) if window.length == 1 else f"{window.first} to {last}"


def plan_for(src: Sharding, dst: Sharding, shape: Sequence[int | tirx.PrimExpr]) -> tuple[Move, ...]:
    """The moves from `src` to `dst` of a tensor of the global `shape`."""
    large = _UNKNOWN * src.mesh.num_devices
    return plan_moves(src, dst, [int_or(size, large) for size in shape])
