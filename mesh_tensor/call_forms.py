"""The ways to call a kernel: which parameters are passed, and which are made and returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tvm import tirx

from .errors import refuse
from .signature import Signature


@dataclass(frozen=True)
class CallForm:
    """One way to call a kernel: the parameters that are passed, and those that are returned."""

    passed: tuple[str, ...]
    returned: tuple[str, ...]


def given_out_idx(func: tirx.PrimFunc, out_idx: int | Sequence[int] | None) -> list[int] | None:
    """`out_idx` as the caller states it, or else the kernel's own `tilelang_out_idx`, as a list."""
    if out_idx is None and func.attrs and "tilelang_out_idx" in func.attrs:
        out_idx = [int(index) for index in func.attrs["tilelang_out_idx"]]
    return [out_idx] if isinstance(out_idx, int) else None if out_idx is None else list(out_idx)


def checked_out_idx(out_idx: list[int], signature: Signature, writes: frozenset[str]) -> tuple[str, ...]:
    """The names of the parameters that are made and returned, or a MeshTensorError with all that is wrong."""
    count = len(signature.params)
    problems, made = [], []
    for index in out_idx:
        if not isinstance(index, int) or not -count <= index < count:
            problems.append(f"out_idx has {index!r}, but there are {count} parameters")
        elif (name := signature.params[index].name) not in writes:
            problems.append(f"out_idx has {index}, but the kernel does not write parameter {name!r}")
        elif name in made:
            problems.append(f"out_idx has parameter {name!r} twice")
        else:
            made.append(name)
    if problems:
        written = ", ".join(f"{i}: {p.name}" for i, p in enumerate(signature.params) if p.name in writes)
        refuse(problems, where=f"kernel {signature.name!r}", fix=f"use the indices of what it writes ({written})")
    return tuple(made)


def call_forms(
    signature: Signature, out_idx: list[int] | None, reads: frozenset[str], writes: frozenset[str]
) -> dict[int, CallForm]:
    """The ways to call a kernel that reads and writes these parameters, by the number of arguments."""
    names = tuple(param.name for param in signature.params)
    written = tuple(name for name in names if name in writes)
    if out_idx is not None:
        made = checked_out_idx(out_idx, signature, writes)
        passed = tuple(name for name in names if name not in made)
        return {len(passed): CallForm(passed, made)}
    needed = tuple(name for name in names if name in reads or name not in writes)
    return {len(names): CallForm(names, written), len(needed): CallForm(needed, written)}


def refuse_count(kernel: str, count: int, forms: Mapping[int, CallForm]) -> NoReturn:
    """Raise a MeshTensorError: `kernel` can't be called with that many arguments."""
    expected = sorted(f"{len(form.passed)} ({', '.join(form.passed)})" for form in forms.values())
    refuse(
        f"{count} arguments, but expected {' or '.join(expected)}",
        where=f"call of kernel {kernel!r}",
        fix="pass the tensors in the order of the kernel's parameters",
    )
