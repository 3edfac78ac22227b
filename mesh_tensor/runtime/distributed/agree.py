"""agree: before the first collective of a kernel, all ranks find out together whether they are about to run the
same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch
import torch.distributed as dist

from ...errors import refuse
from ...program import CollectiveStep, KernelStep, OpStep, Program
from .faults import Faults
from .ranks import Ranks

_SIZE = 32


def program_facts(program: Program, target: str, layouts: Mapping[str, str]) -> dict[str, str]:
    """All that has to be the same on every rank, by topic, as text. `layouts`: parameter -> how its argument lies."""
    values = program.values.values()
    kernels = [step.func.script(show_meta=True) for step in program.steps if isinstance(step, KernelStep)]
    ops = [f"{s.results} = {s.call.expr}" for s in program.steps if isinstance(s, OpStep)]
    steps = [f"{s.kind}({s.src}, {s.dst}, {s.axes}, {s.op})" for s in program.steps if isinstance(s, CollectiveStep)]
    return {
        "version of mesh_tensor": _version(),
        "kernel": program.name,
        "mesh": str(program.mesh),
        "shapes": ", ".join(f"{value.name} {value.shape}" for value in values),
        "dtypes": ", ".join(f"{value.name} {value.dtype}" for value in values),
        "layouts": ", ".join(f"{value.name} '{value.sharding}'" for value in values),
        "layouts of the arguments": ", ".join(f"{name} '{layout}'" for name, layout in layouts.items()),
        "target": target,
        "steps": "\n".join([*steps, *ops, *kernels]),
    }


def agree(ranks: Ranks, faults: Faults, device: torch.device, facts: Mapping[str, str], refusal: str = "") -> None:
    """Return if all ranks have the same facts; else raise the same MeshTensorError on all of them.

    A rank that can't run the call takes part with its `refusal`: it returns, the others raise."""
    group = ranks.everybody()
    mine = (facts, refusal)
    digest = hashlib.sha256(repr((sorted(facts.items()), refusal)).encode()).digest()
    try:
        digests = _gather(digest, len(group.members), device, group.process_group)
        if len(set(digests)) == 1 and not refusal:
            return
        everything: list = [None] * len(group.members)
        dist.all_gather_object(everything, mine, group=group.process_group)
    except RuntimeError as error:
        faults.blame(error, "the agreement on what to run", group.members)
    if refusal:
        return
    by_rank = dict(sorted((ranks.place(m), found) for m, found in zip(group.members, everything, strict=True)))
    refused = [f"rank {rank} refused the call: {_facts_in(text)}" for rank, (_, text) in by_rank.items() if text]
    refuse(
        refused or _differences({rank: found for rank, (found, _) in by_rank.items()}),
        where=f"call of kernel {facts.get('kernel', '')!r} on {ranks.mesh}",
        why="all ranks of a mesh have to run the same steps",
        fix="compile the same kernel on every rank, and pass tensors of the same global shapes and dtypes",
    )


def _gather(digest: bytes, count: int, device: torch.device, process_group: dist.ProcessGroup) -> list[bytes]:
    sent = torch.frombuffer(bytearray(digest) * count, dtype=torch.uint8).to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=process_group)
    data = bytes(received.cpu().tolist())
    return [data[index : index + _SIZE] for index in range(0, len(data), _SIZE)]


def _differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Per topic on which ranks differ: who has what."""
    found = []
    for topic in next(iter(facts.values())):
        ranks_with: dict[str, list[int]] = {}
        for rank, mine in facts.items():
            ranks_with.setdefault(mine[topic], []).append(rank)
        if len(ranks_with) > 1:
            sides = [f"{_named(ranks)}: {_short(text)}" for text, ranks in ranks_with.items()]
            found.append(f"{topic} differ between ranks: {'; '.join(sides)}")
    return found


def _facts_in(refusal: str) -> str:
    """What was wrong, of a MeshTensorError's message, on one line."""
    lines = [line.strip() for line in refusal.splitlines()]
    end = next((i for i, line in enumerate(lines) if line.startswith(("where: ", "why: ", "fix: "))), len(lines))
    facts = lines[:end] if end < 2 else lines[1:end]
    return "; ".join(fact.removeprefix("- ") for fact in facts)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _short(text: str) -> str:
    if len(text) <= 300 and "\n" not in text:
        return text
    return f"digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _version() -> str:
    try:
        return metadata.version("mesh-tensor")
    except metadata.PackageNotFoundError:
        return "not installed"
