"""Machines that are known by name, each number with its source; and machines as text: JSON to keep and to write by
hand, and a table to read.

Rates are what is reached. Of matrix units that is a data sheet's peak times what large products get of it; small ones
get less because of what every kernel takes to start and to drain (`classes`). Links are a data sheet's rate per
direction times what collectives get of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from .errors import did_you_mean, listing, refuse, shown
from .machine import Link, Machine, Memory, Roofline, Tuning

_CONVERTED = ("float16", "float8", "float6", "float4")  # what processors compute in float32

# What CPU ranks do, measured on 2 cores of an AMD EPYC (Zen 5), one thread and one core per rank. Plans are made for
# it where nothing else is asked for, so it is the same on every rank whatever that runs on.
CPU = Machine(
    name="gloo with a core per rank",
    flops={"float32": 1e11, "float64": 4.2e10, "bfloat16": 4.2e11, **dict.fromkeys(_CONVERTED, 2.4e9)},
    memory=(Memory(2 << 20, 7.5e10), Memory(8 << 30, 3.2e10)),
    links=(Link("gloo", None, rate=1.5625e9, start=1.28e-4),),
    launch=5e-6,
    busy=1.0,
    channel_block=16,
    sources={
        "flops": "torch.mm, one thread: GFLOP/s 97 in float32, 42 in float64, 430 in bfloat16, 2 in float16 and less",
        "memory": "torch.add, one thread: 71 to 98 GB/s up to 3 MB, 30 to 35 GB/s from 12 MB on",
        "links": "exchanges of 2 ranks, medians: 100 to 150 us for 4 KB, 1.2 to 1.5 GB/s from 1 MB on",
        "busy": "torch.mm beside an all-to-all of 1 to 16 MB takes as long as one after the other, or longer",
        "channel_block": "oneDNN's layouts for 512-bit vectors, as torch's profiler shows them",
    },
)
# Not measured: with a core for gloo's threads the memory's bandwidth is still shared.
CPU_TO_SPARE = replace(CPU, name="gloo with cores to spare", busy=0.25)

_NVLINK_SHARE = 0.65  # of a direction's rate, that NCCL's large collectives get
_INFINIBAND_SHARE = 0.9
_GPU_LAUNCH = 2e-6
# Large products get 80% of the peak: bfloat16 on an H200 790 of 989 Tflop/s. Element-wise work is bound by memory, of
# which large tensors get 90%.
_GPU_CLASSES = {
    "product": Roofline(start=8e-6, flops=0.8, memory=0.9),
    "nn.attention": Roofline(start=8e-6, flops=0.6, memory=0.9),
    "elementwise": Roofline(start=1e-6, flops=0.1, memory=0.9),
    "reduce": Roofline(start=1e-6, flops=0.1, memory=0.85),
    "move": Roofline(start=1e-6, flops=0.1, memory=0.9),
}
_GPU_SOURCES = {
    "classes": "large products in bfloat16 measured on an H200: 790 Tflop/s; memory as in Calculon's A100 (90% of it)",
    "links": "data sheets, per direction; 65% of NVLink and 90% of InfiniBand are what collectives get",
    "launch": "CUDA's time between kernels of one stream, 2 us",
}


def _nvidia(name: str, flops: dict[str, float], memory: Memory, nvlink: float, network: float, sheet: str) -> Machine:
    """Nodes of 8 GPUs. `nvlink` and `network` are a direction's rates of a GPU."""
    links = (
        Link("NVLink", 8, rate=nvlink * _NVLINK_SHARE, start=1e-5, hop=1e-6),
        Link("network", None, rate=network * _INFINIBAND_SHARE, start=2e-5, hop=2e-6),
    )
    sources = {"flops, memory": sheet, **_GPU_SOURCES}
    return Machine(name, flops, (memory,), links, launch=_GPU_LAUNCH, busy=0.1, classes=_GPU_CLASSES, sources=sources)


def _h100() -> Machine:
    rates = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12}
    rates |= {"float32": 67e12, "float64": 67e12}
    sheet = "NVIDIA H100 SXM5 80GB data sheet; ConnectX-7, 400 Gb/s per GPU"
    return _nvidia("h100", rates, Memory(80 * 10**9, 3.35e12), 450e9, 50e9, sheet)


def _h200() -> Machine:
    sheet = "NVIDIA H200 SXM 141GB data sheet; ConnectX-7, 400 Gb/s per GPU"
    made = _h100()
    sources = {**made.sources, "flops, memory": sheet}
    return replace(made, name="h200", memory=(Memory(141 * 10**9, 4.8e12),), sources=sources)


def _a100() -> Machine:
    rates = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12}
    sheet = "NVIDIA A100 SXM4 80GB data sheet; Selene: HDR InfiniBand, 200 Gb/s per GPU"
    return _nvidia("a100", rates, Memory(80 * 10**9, 2.039e12), 300e9, 25e9, sheet)


def _v100() -> Machine:
    rates = {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}
    sheet = "NVIDIA V100 SXM2 16GB data sheet; one InfiniBand card of 100 Gb/s per node of 8"
    return _nvidia("v100", rates, Memory(16 * 2**30, 9.0e11), 150e9, 12.5e9 / 8, sheet)


def _tpu_v4() -> Machine:
    return Machine(
        name="tpu-v4",
        flops={"bfloat16": 275e12, "float32": 275e12 / 6},
        memory=(Memory(32 * 2**30, 1.2e12),),
        links=(Link("ICI", 4096, rate=100e9, start=5e-6, hop=1e-6),),
        launch=1e-6,
        busy=0.1,
        classes=_GPU_CLASSES,
        sources={
            "flops, memory": "Jouppi et al. 2023 (2304.01433), table 4: 275 TFLOP/s bfloat16, 32 GiB, 1200 GB/s",
            "links": "the same: 6 links of 50 GB/s; a ring along one axis of the torus uses two of them",
            "float32": "an estimate: six bfloat16 products per float32 product",
            "classes": "those of the GPUs here, not measured",
        },
    )


def _laptop() -> Machine:
    return replace(
        CPU,
        name="laptop",
        memory=(Memory(1 << 20, 6e10), Memory(16 << 30, 1.2e10)),
        flops={"float32": 6e10, "float64": 3e10, "bfloat16": 3e10, **dict.fromkeys(_CONVERTED, 2e9)},
        channel_block=8,
        sources={"all": "an estimate: a core with 256-bit vectors at 3 GHz, memory shared by the cores"},
    )


PRESETS: dict[str, Callable[[], Machine]] = {
    "cpu": lambda: CPU,
    "laptop": _laptop,
    "v100": _v100,
    "a100": _a100,
    "h100": _h100,
    "h200": _h200,
    "tpu-v4": _tpu_v4,
}


def preset(name: str) -> Machine:
    """The machine of that name; a number after an x is how many devices it has: "h100x16"."""
    found = re.fullmatch(r"(.+?)(?:x(\d{1,18}))?", str(name))
    kind, count = found.groups() if found else (name, None)
    if kind not in PRESETS:
        refuse(
            f"there is no machine {name!r}{did_you_mean(kind, PRESETS)}",
            why=f"known are {listing(tuple(PRESETS))}, each with or without a number of devices: 'h100x16'",
            fix="use one of them, or Machine.from_text, or Machine.measure() for this one",
        )
    made = PRESETS[kind]()
    return made if count is None else replace(made, name=str(name), devices=int(count))


def machine_named(machine: Machine | str | None) -> Machine | None:
    """What callers say of a machine: one, a preset's name, or nothing."""
    if machine is not None and not isinstance(machine, (Machine, str)):
        refuse(f"{shown(machine)} is no machine", fix="pass an mt.Machine, or the name of one: 'h100x16'")
    return preset(machine) if isinstance(machine, str) else machine


def machine_code(machine: Machine) -> str:
    """The machine as an argument in Python: a preset's name, or `machine`, which whoever runs the code has to have."""
    count = "" if machine.devices is None else f"x{machine.devices}"
    return next((repr(f"{kind}{count}") for kind in PRESETS if preset(f"{kind}{count}") == machine), "machine")


_FIX = "write one with machine.to_text(), and change that"


def to_text(machine: Machine) -> str:
    """JSON with a field per line group; what has its default is left out."""
    default = Machine(machine.name, machine.flops, machine.memory)
    needed = ("name", "flops", "memory")
    given = {f.name: getattr(machine, f.name) for f in fields(machine)}
    kept = {name: value for name, value in given.items() if name in needed or value != getattr(default, name)}
    return json.dumps({name: _plain(value) for name, value in kept.items()}, indent=2) + "\n"


def from_text(text: str) -> Machine:
    """The machine that `to_text` gave as text. The refusal lists everything that is wrong with the text."""
    try:
        given = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        refuse(f"a machine's text is no JSON: {error}", where=shown(text), fix=_FIX)
    if not isinstance(given, dict):
        refuse(f"a machine's text is {shown(given)}, no object", fix=_FIX)
    problems = list(_unknown_names(given, [f.name for f in fields(Machine)], "a machine"))
    problems += [f"it has no {name}" for name in ("name", "flops", "memory") if name not in given]
    made = {name: _part(name, value, problems) for name, value in given.items()}
    if problems:
        refuse(problems, where=f"machine {given.get('name', '')!r}", fix=_FIX)
    return Machine(**made)


def table(machine: Machine) -> str:
    """What the machine can do, in words."""
    rates = ", ".join(f"{dtype} {_short(rate)}" for dtype, rate in machine.flops.items())
    levels = "; ".join(f"{_short(level.size)}B at {_short(level.rate)}B/s" for level in machine.memory)
    count = "" if machine.devices is None else f"{machine.devices} of "
    lines = [f"machine {machine.name}", f"  devices  {count}{rates} flop/s", f"  memory   {levels}"]
    lines += [f"  on       {machine.processor}"] * (machine.processor is not None)
    lines += [f"  launch   {_time(machine.launch)}"]
    if machine.processors is not None:
        again = f"{_time(machine.turn)} and {machine.start:.3g} launches"
        lines.append(f"  share    {machine.processors} processors; where devices take turns, a step starts in {again}")
    for name in ("cold_start", "apart", "call", "result", "action", "value"):
        if getattr(machine, name):
            lines.append(f"  {name:8s} {_time(getattr(machine, name))}")
    if machine.channel_block is not None:
        lines.append(f"  blocks   convolutions copy their operands into blocks of {machine.channel_block} channels")
    for link in machine.links:
        reach = "any number" if link.devices is None else f"up to {link.devices}"
        hop = f", {_time(link.hop)} per further message" if link.hop else ""
        lines.append(f"  {link.name:8s} {reach}: {_short(link.rate)}B/s, starts in {_time(link.start)}{hop}")
    for name, each in machine.classes.items():
        shares = f"{each.flops:.0%} of flop/s, {each.memory:.0%} of bytes/s"
        again = f"; blocks are loaded again, or copied, at {each.again:.0%}" if each.again else ""
        lines.append(f"  class    {name}: {_time(each.start)} and {shares}{again}")
    lines += [f"  source   {what}: {where}" for what, where in machine.sources.items()]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Records as objects."""
    if isinstance(value, (Roofline, Link, Memory, Tuning)):
        return asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _part(name: str, value: Any, problems: list[str]) -> Any:
    """A field of a Machine from its JSON."""
    if name in ("memory", "links"):
        return tuple(_record(_RECORDS[name], item, name, problems) for item in _of_kind(list, value, name, problems))
    if name == "classes":
        items = _of_kind(dict, value, name, problems).items()
        return {key: _record(Roofline, item, f"classes.{key}", problems) for key, item in items}
    if name == "tuning":
        return _record(Tuning, value, name, problems)
    return _of_kind(dict, value, name, problems) if name in ("flops", "sources") else value


_RECORDS: Mapping[str, type] = {"memory": Memory, "links": Link}


def _record(kind: type, value: Any, where: str, problems: list[str]) -> Any:
    """A record from an object with its fields; None, and a problem more, where that can't be."""
    given = _of_kind(dict, value, where, problems)
    known = [f.name for f in fields(kind)]
    found = list(_unknown_names(given, known, where))
    try:
        made = None if found else kind(**given)
    except TypeError:
        found.append(f"{where} has {', '.join(given) or 'nothing'}, and needs {', '.join(known)}")
        made = None
    problems += found
    return made


def _unknown_names(given: Iterable[str], known: Sequence[str], what: str) -> Iterable[str]:
    """What is wrong with names that nothing has."""
    for name in given:
        if name not in known:
            yield f"{what} has no {name!r}{did_you_mean(name, known)}"


def _of_kind(kind: type, value: Any, where: str, problems: list[str]) -> Any:
    if isinstance(value, kind):
        return value
    problems.append(f"{where} is {shown(value)}, no {'object' if kind is dict else 'list'}")
    return kind()


def _short(number: float) -> str:
    """Three digits and a decimal prefix."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}"
    return f"{number:.3g} "


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
