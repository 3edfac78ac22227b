"""Machine: what devices and the links between them can do. The one place of every cost constant.

Units are seconds, bytes, floating-point operations; rates are per second and per device, and are those that are
reached, not those of a data sheet: `sources` says where each comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from .dtypes import is_float, numpy_dtype
from .errors import listing, refuse, shown
from .machine_checks import check_number, problems_of, unfit_parts


@dataclass(frozen=True)
class Memory:
    """A level of a device's memory hierarchy: `size` in bytes, and the `rate` of reads and writes in bytes per
    second."""

    size: int
    rate: float


@dataclass(frozen=True)
class Link:
    """A network level: it connects blocks of `devices` neighbours in the mesh's device order (None: any number).

    rate    bytes per second that one device receives
    start   latency of a collective in seconds: what it takes without its bytes
    hop     seconds that every message after the first one adds to that
    """

    name: str
    devices: int | None
    rate: float
    start: float
    hop: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """The roofline model of a class of operators: a call takes `start` seconds, then as long as the slower of its
    operations and its memory traffic. `flops` and `memory` are the shares (0 .. 1) of the machine's rates that the
    class reaches. `again`: the share of the memory rate at which a kernel reloads blocks from beyond the nearest level,
    in time that its operations don't hide; 0: they hide it. Of convolutions: that at which they copy their operands and
    results into blocks of channels (`Machine.channel_block`)."""

    start: float = 0.0
    flops: float = 1.0
    memory: float = 1.0
    again: float = 0.0


@dataclass(frozen=True)
class Work:
    """The time of one call, in seconds: `start` before it computes; `flops` and `memory` for its operations and its
    memory traffic, which overlap; `far` for reloads from farther levels, which nothing hides."""

    start: float
    flops: float
    memory: float
    far: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the call in seconds."""
        return self.start + max(self.flops, self.memory) + self.far

    @property
    def bound(self) -> str:
        """What limits the call: "start", "flops" or "memory"."""
        parts = ("flops", self.flops), ("memory", max(self.memory, self.far)), ("start", self.start)
        return max(parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Tuning:
    """Sizes from which one way of doing something beats another, on the processor that a Machine describes.

    elements_per_thread  elements of a copy that make up for handing them to another thread
    seconds_per_thread   seconds of an operator that make up for handing it to another thread
    kept_memory          bytes of tiles' memory that are kept for later tiles
    fresh_memory         bytes from which memory is taken from the system, and kept
    rotate_from          bytes to everybody that are sent peer by peer from where they lie
    chunked_from         bytes from which an all-reduce goes chunk by chunk
    segment              bytes of a chunked all-reduce that are reduced at a time
    totals               running totals of a reduction along the last dim
    long_row             elements of a row from which loops over it are joined where a row stays in registers
    long_scalar_row      the same where a scalar per row goes through memory
    stack                bytes of a block that may lie on the stack
    products_ahead       products that may run between a collective's start and the use of its result
    """

    elements_per_thread: int = 1 << 20
    seconds_per_thread: float = 1e-4
    kept_memory: int = 1 << 28
    fresh_memory: int = 1 << 20
    rotate_from: int = 1 << 20
    chunked_from: int = 1 << 22
    segment: int = 1 << 23
    totals: int = 32
    long_row: int = 64
    long_scalar_row: int = 256
    stack: int = 1 << 10
    products_ahead: int = 2


@dataclass(frozen=True)
class Machine:
    """The cost model of a set of equal devices and the network between them. Times are in seconds, rates per second.

    flops      dtype name -> peak operations per second of the matrix units; "float8" stands for all 8-bit formats
    memory     the memory hierarchy, nearest level first; tensors live in the last one
    links      the network levels, innermost first
    launch     time between two kernels or operators that no other work hides
    call       time of a run besides its steps
    busy       the share (0 .. 1) of a collective's time by which it slows the kernel that runs beside it
    devices    number of devices (None: as many as a mesh has)
    processors number of devices that compute at the same time, where devices share processors (None: all)
    turn       where devices take turns on a processor: time between two steps that belongs to neither
    start      where devices take turns: `launch` as a multiple of what it is on one device alone
    cold_start extra time of a step whose code has left the caches, because more bytes than the second level holds were
               touched since its operator last started
    apart      where devices share processors: time to hand a step to the threads that run it at the same time
    result     where devices share processors: time to hand a result to the caller, for each of its tiles, besides
               copying it; 0: it is handed over as it is
    action     of a pipeline: time of an action besides its fragment's run, as threads wait for each other's values
    value      of a pipeline: time in which an action hands a tile of a value to its fragment, or takes one from it
    channel_block  number of channels in a block of the layout that convolutions copy their operands into, as oneDNN
               does that on CPUs; None: they copy nothing
    processor  the processor that `measure` ran on; None: unknown
    price      price of one device per hour, in any currency
    classes    name of an operator, or of a class of operators -> the share of the rates that it reaches
    tuning     thresholds between implementations, for the processor of this machine
    sources    name of a field -> where its numbers come from

    >>> machine = Machine("one", {"float32": 1e12}, (Memory(2**30, 1e11),), (Link("wire", None, 1e9, 1e-5),))
    >>> machine.peak("float32") / machine.link(8).rate
    1000.0
    """

    name: str
    flops: Mapping[str, float]
    memory: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    _: KW_ONLY
    launch: float = 0.0
    call: float = 0.0
    busy: float = 0.0
    devices: int | None = None
    processors: int | None = None
    turn: float = 0.0
    start: float = 1.0
    cold_start: float = 0.0
    apart: float = 0.0
    result: float = 0.0
    action: float = 0.0
    value: float = 0.0
    channel_block: int | None = None
    processor: str | None = None
    price: float | None = None
    classes: Mapping[str, Roofline] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    sources: Mapping[str, str] = field(default_factory=dict)

    _measure: ClassVar[Callable[[float], Machine]]  # they run operators, which this module knows nothing of
    _with_kernel: ClassVar[Callable[[Machine, Any], Machine]]

    def __post_init__(self) -> None:
        parts = {"memory": Memory, "links": Link, "classes": Roofline, "tuning": Tuning}
        if unfit := list(unfit_parts(self, parts)):
            refuse(unfit, where=f"machine {shown(self.name)}", fix="pass what Machine's docstring says of each")
        for name in ("flops", "classes", "sources"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name in ("memory", "links"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = list(problems_of(self))
        if problems:
            refuse(problems, where=f"machine {self.name!r}", fix=_NUMBERS)

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.links))

    def peak(self, dtype: object) -> float:
        """Peak operations per second on `dtype` (a name, or a torch.dtype). A float8 format without a rate of its own
        has that of "float8"; integers and booleans have that of float32. Refused where there is no such rate."""
        wanted = str(dtype).removeprefix("torch.")
        if not is_float(wanted):
            if not wanted.startswith(("int", "uint", "bool")):
                numpy_dtype(wanted)  # refuses what is none
            wanted = "float32"
        if wanted not in self.flops:
            wanted = wanted.partition("_")[0]
        if wanted not in self.flops:
            refuse(
                f"no rate of operations on {dtype}",
                where=f"machine {self.name!r}",
                why=f"it has rates for {listing(sorted(self.flops))}",
                fix=f"add one: dataclasses.replace(machine, flops={{**machine.flops, {wanted!r}: ...}})",
            )
        return self.flops[wanted]

    @property
    def main_memory(self) -> Memory:
        """The memory level in which tensors live: the last one."""
        return self.memory[-1]

    def memory_rate(self, nbytes: float) -> float:
        """Bytes per second of memory traffic over a working set of `nbytes`: the rate of the nearest level that holds
        it."""
        return next((level.rate for level in self.memory if nbytes <= level.size), self.memory[-1].rate)

    def link(self, devices: int) -> Link:
        """The innermost network level that connects a block of `devices` neighbours. Refused where none does."""
        found = next((link for link in self.links if link.devices is None or devices <= link.devices), None)
        if found is None:
            largest = max((link.devices or 0 for link in self.links), default=1)
            refuse(
                f"nothing connects {devices} devices",
                where=f"machine {self.name!r}",
                why=f"its links reach {largest}" if self.links else "it has no links",
                fix=f"use a mesh of at most {largest} devices, or a machine with a link of devices >= {devices}",
            )
        return found

    def joining(self, first: int, last: int) -> Link:
        """The innermost network level that connects device number `first` with device number `last`."""
        blocks = (link for link in self.links if link.devices is None or first // link.devices == last // link.devices)
        return next(blocks, None) or self.link(last + 1)  # which says how far links reach

    def seen_from(self, first: int, devices: int) -> Machine:
        """The machine as a mesh on devices `first` .. `first + devices - 1` sees it: where the mesh starts inside a
        block of a link and ends in another one, that link connects smaller blocks of the mesh."""
        links = list[Link]()
        for link in self.links:
            blocks = link.devices
            if blocks is not None and first // blocks < (first + devices - 1) // blocks:
                blocks = math.gcd(first, blocks)
            if blocks is None or not links or blocks > (links[-1].devices or 0):
                links.append(replace(link, devices=blocks))
        return self if tuple(links) == self.links else replace(self, links=tuple(links))

    def roofline(self, *names: str) -> Roofline:
        """The class of the first of `names` that has one; where none has, the machine's full rates."""
        return next((self.classes[name] for name in names if name in self.classes), _PLAIN)

    def work(
        self, flops: float, nbytes: float, dtype: str, *names: str, again: float = 0.0, between: float = 0.0
    ) -> Work:
        """The time of a call that does `flops` operations on `dtype` and moves `nbytes` bytes; `names` as in
        `roofline`. `again`: bytes that a kernel reloads, each after it has touched `between` other bytes."""
        roofline = self.roofline(*names)
        computing = flops / (self.peak(dtype) * roofline.flops)
        moving = nbytes / (self.memory_rate(nbytes) * roofline.memory)
        beyond = roofline.again and nbytes > self.memory[0].size
        far = again / (self.memory_rate(between) * roofline.again) if beyond else 0.0
        return Work(self.launch + roofline.start, computing, moving, far)

    def rounds(self, devices: int, apart: bool = True) -> int:
        """Rounds in which shared processors run a step of `devices` devices: all of them where devices run `apart` (in
        parallel), else one."""
        return 1 if self.processors is None else math.ceil(devices / (self.processors if apart else 1))

    def in_turn(self, work: Work, rounds: int, devices: int, apart: bool) -> float:
        """Seconds of a call on `devices` devices in `rounds` rounds: one device after another, or, `apart`, as many at
        a time as there are processors."""
        if self.processors is None or devices == 1:
            return work.seconds * rounds
        handed = self.apart if apart else 0.0
        return self.turn + handed + rounds * (work.seconds + self.launch * (self.start - 1))

    def colder(self, touched: float) -> float:
        """Seconds of `cold_start` that apply after `touched` bytes were touched: a share of it, in eighths."""
        if not self.cold_start or len(self.memory) < 2:
            return 0.0
        nearest, next_one = self.memory[0].size, self.memory[1].size
        gone = min(1.0, max(0.0, (touched - nearest) / (next_one - nearest)))
        return self.cold_start * int(8 * gone) / 8

    def called(self, touched: float, results: Iterable[tuple[int, int]]) -> float:
        """Seconds of a run besides its steps. It touches `touched` bytes; `results`: (bytes, number of tiles) of each
        result."""
        given = list(results) if self.result else []
        copied = 2 * sum(nbytes / self.memory_rate(2 * nbytes) for nbytes, _ in given)
        return self.call + self.result * sum(parts for _, parts in given) + self.colder(touched) + copied

    @property
    def flops_per_byte(self) -> float:
        """Float32 operations that a device does in the time in which it receives one byte over the outermost link."""
        return self.peak("float32") / self._outermost.rate

    @property
    def bytes_per_start(self) -> float:
        """Bytes that a device receives over the outermost link in the time of a collective's latency."""
        return self._outermost.start * self._outermost.rate

    @property
    def _outermost(self) -> Link:
        return self.links[-1] if self.links else self.link(2)  # which says that there is none

    def with_devices(self, devices: int) -> Machine:
        """This machine with another number of devices."""
        return replace(self, devices=devices)

    def check_holds(self, devices: int, what: str) -> None:
        """Refuse `what`, which needs `devices` devices, if the machine has fewer."""
        if self.devices is not None and devices > self.devices:
            refuse(
                f"{what} has {devices} devices, the machine {self.devices}",
                where=f"machine {self.name!r}",
                fix=f"take a mesh of at most {self.devices} devices, or machine.with_devices({devices})",
            )

    @classmethod
    def measure(cls, seconds: float = 60.0) -> Machine:
        """Measure this computer as the devices of a virtual mesh: times of operators and collectives, in CPU time, so
        that other processes don't disturb it. It takes at most about `seconds`, and at least some 20 s. Classes of
        operators that there was no time for are named in a warning, and in `sources["classes"]`; they are simulated at
        the rates of arithmetic and memory alone."""
        fix = "say how long it may take: a number above 0"
        check_number("seconds", seconds, where="Machine.measure", fix=fix, above_zero=True)
        return cls._measure(seconds)

    def with_kernel(self, kernel: Any) -> Machine:
        """This machine (measured here) with a class for a kernel: the share of the machine's rates that the kernel
        reaches, measured at its sizes on one device of target "c". Simulations use it for kernels of that name, at all
        sizes. A kernel that has a class is not measured again.

        Raises:
            MeshTensorError: the machine's rates are not those of this processor, or it is no kernel of known sizes, or
                doesn't run.
        """
        return Machine._with_kernel(self, kernel)

    @staticmethod
    def preset(name: str) -> Machine:
        """The preset of a name: "h100", or "h100x16" for 16 devices. Refused where there is none; `presets()` lists
        them."""
        from .machine_presets import preset

        return preset(name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names of the presets."""
        from .machine_presets import PRESETS

        return tuple(PRESETS)

    def to_text(self) -> str:
        """The machine as JSON, for `from_text`."""
        from .machine_presets import to_text

        return to_text(self)

    @staticmethod
    def from_text(text: str) -> Machine:
        """The machine that a JSON text describes: one of `to_text`, or written by hand.

        Raises:
            MeshTensorError: it is no JSON, or has unknown fields or wrong values (all are named).
        """
        from .machine_presets import from_text

        return from_text(text)

    def __str__(self) -> str:
        from .machine_presets import table

        return table(self)


_PLAIN = Roofline()
_NUMBERS = "rates and sizes are numbers above 0, times from 0 up; none is below 1e-30 or above 1e30 but for 0"
