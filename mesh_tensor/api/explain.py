"""explain: what was decided for a kernel, why, and what it costs, as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tvm import tirx

from mesh_tensor.lowering.pipeline import Lowered
from mesh_tensor.program.lifetimes import peak_bytes
from mesh_tensor.program.steps import CollectiveStep, KernelStep, OpStep, Program, Step, WaitStep, of_kinds
from mesh_tensor.rules.kernel.factors import Factor, tile_extent
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.runtime.ranks.dtensor_ports import Transfer
from mesh_tensor.targets.cpu.blas import who_multiplies
from mesh_tensor.tir.tile_ops import Gemm


def explain(program: Program, target: str = "", arrived: Sequence[Transfer] = ()) -> str:
    """In which view the kernel was read and why; factors and what splits them, every buffer's placement as asked and as
    used, every step with its bytes and reason, what could not be split, and the cost per device.

    Args:
        program: a Program that `lower_to_program` made.
        target: what it is compiled for, if it is: then the text says how products are computed there.
        arrived: the changes of layout that the DTensors of the last call needed.

    Returns:
        Text in tables. Bytes and flops are those of one device.
    """
    lowered = program.lowered
    if lowered is None:
        return "\n".join(_steps(program))
    sections = [
        [f"kernel {program.name} on {program.mesh}", f"rule: {lowered.rule}", str(lowered.reading)],
        ["factors", *_factors(lowered)],
        ["buffers", *_buffers(program, lowered)],
        ["steps of each device", *_steps(program)],
        _arrived(arrived),
        _overlap(program),
        _whole(lowered),
        _products(program) if target == "c" else [],
        _costs(program),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _factors(lowered: Lowered) -> list[str]:
    rows: list[tuple[object, ...]] = [("factor", "size", "combines", "split by", "tile", "because")]
    assignment = lowered.assignment
    by_name = {factor.name: factor for factor in assignment.factors}
    for name, kind in lowered.rule.factors.items():
        axes = assignment.axes_of(by_name[name])
        size = _whole_size(lowered, by_name[name])
        tile = tile_extent(size, [lowered.mesh.size(a) for a in axes])
        why = "; ".join(dict.fromkeys(assignment.reasons[a] for a in axes)) or "no axis uses it"
        rows.append((name, size, kind.split(":")[0], ", ".join(axes) or "-", tile, why))
    unused = [axis for axis, factor in assignment.axes.items() if factor is None]
    notes = [f"  axis {axis} splits nothing: {assignment.reasons[axis]}" for axis in unused]
    return [*table(rows), *notes]


def _whole_size(lowered: Lowered, factor: Factor) -> object:
    """The size of the dim that a factor walks, or walks a tile of."""
    if not lowered.reading.over_tiles:
        return factor.size
    tensors = {name: given or left for name, given, left in lowered.parameters}
    param, dim = factor.dims[0]
    tensor = tensors.get(param)
    return factor.size if tensor is None else lowered.tensors[tensor].shape[dim]


def _buffers(program: Program, lowered: Lowered) -> list[str]:
    rows: list[tuple[object, ...]] = [("buffer", "shape", "dtype", "asked", "used as", "tile")]
    for parameter in program.parameters:
        asked = lowered.asked.get(parameter.name)
        used = _layouts_used(program, parameter.name)
        value = program.values[str(parameter.output or parameter.input)]
        shape = " x ".join(map(str, value.shape))
        tile = " x ".join(map(str, value.tile_shape))
        rows.append((parameter.name, shape, value.dtype, "(any)" if asked is None else asked, "; ".join(used), tile))
    return table(rows)


def _layouts_used(program: Program, name: str) -> list[str]:
    """The layouts in which kernels take or leave a parameter."""
    mine = {v.name for v in program.values.values() if v.name == name or v.name.startswith((f"{name}.", f"{name}["))}
    used = [str(program.values[arg].sharding) for step in program.kernels for arg in step.args if arg in mine]
    return list(dict.fromkeys(used)) or ["(unused)"]


def _steps(program: Program) -> list[str]:
    """The steps that do something, on the values that they take."""
    head = ("step", "on", "over", "bytes received", "flops", "because")
    return table([head, *step_rows(program, lambda step: step.reads)])


def step_rows(program: Program, names: Callable[[Step], Sequence[str]]) -> list[tuple[str, ...]]:
    """Per step that does something: what, on which values (`names` of it), over which axes, bytes, flops, and why."""

    def kernel(step: KernelStep) -> tuple[str, ...]:
        return (step.words, ", ".join(names(step)), "", "", f"{step.flops:,}", "")

    def op(step: OpStep) -> tuple[str, ...]:
        by = "torch" if step.kernel is None else f"kernel {step.kernel.attrs['global_symbol']} for"
        return (f"{by} {operator_name(step.call)}", ", ".join(names(step)), "", "", f"{step.flops:,}", "")

    def collective(step: CollectiveStep) -> tuple[str, ...]:
        kind = f"{step.kind}({step.op})" if step.op else step.kind
        why = f"{step.reason} ({program.values[step.src].sharding} -> {program.values[step.dst].sharding})"
        begins = "" if step.wait else "start "
        return (f"{begins}{kind}", ", ".join(names(step)), ", ".join(step.axes), f"{step.bytes:,}", "", why)

    def wait(step: WaitStep) -> tuple[str, ...]:
        return (f"wait {step.collective.kind}", ", ".join(step.writes), "", "", "", "")

    return of_kinds(program.steps, {KernelStep: kernel, OpStep: op, CollectiveStep: collective, WaitStep: wait})


def _arrived(transfers: Sequence[Transfer]) -> list[str]:
    """Per DTensor that lay otherwise than the kernel takes or makes it: how it was redistributed."""
    rows: list[tuple[object, ...]] = [("parameter", "goes", "from", "to", "steps", "bytes received")]
    for name, comes_in, by_torch, plan in transfers:
        moves = [f"{m.kind}({m.op})" if m.op else m.kind for m in plan.moves]
        steps = "; ".join(f"{kind} over {', '.join(m.axes)}" for kind, m in zip(moves, plan.moves, strict=True))
        steps = f"{steps}, by torch" if by_torch else steps
        rows.append((name, "in" if comes_in else "out", plan.src, plan.dst, steps, f"{plan.bytes:,}"))
    return ["DTensors of the last call on ranks, redistributed", *table(rows)] if transfers else []


def _overlap(program: Program) -> list[str]:
    return ["overlap", *(f"  {note}" for note in program.overlap)] if program.overlap else []


def _whole(lowered: Lowered) -> list[str]:
    if not lowered.whole:
        return []
    notes = [f"  {buffer} dim {dim}: {reason}" for (buffer, dim), reason in lowered.whole.items()]
    return ["asked to be split, but needed whole", *notes]


def _products(program: Program) -> list[str]:
    """How matrix products are computed on a CPU."""
    if not any(isinstance(s.tile_op, Gemm) for kernel in program.kernels for s in read_kernel(kernel.func).statements):
        return []
    return [f"products: {who_multiplies()}"]


def _costs(program: Program) -> list[str]:
    flops = sum(step.flops for step in program.steps)
    sent = sum(step.bytes for step in program.steps)
    return [f"per device: {flops:,} flops, {sent:,} bytes received, at most {peak_bytes(program):,} bytes held"]


def table(rows: Iterable[Sequence[object]]) -> list[str]:
    """Left-aligned columns, two spaces apart; the first row is the header."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return [line.rstrip() for line in lines]


def _text(cell: object) -> str:
    return str(int(cell)) if isinstance(cell, tirx.IntImm) else str(cell)
