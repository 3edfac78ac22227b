"""Kernels in slabs on real ranks: what runs beside what, the bits of bulk, and who is to blame."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.overlap import overlapped
from mesh_tensor.runtime.ranks import ranks_of
from mesh_tensor.runtime.ranks.carriers import Messages
from mesh_tensor.runtime.ranks.faults import Faults
from mesh_tensor.runtime.ranks.rank_backend import RankBackend
from mesh_tensor.runtime.ranks.rank_launch import RankLaunch
from mesh_tensor.targets.kernels import Target, find_target
from tests.refusals import refusal

from .support import in_a_call, pure

REDUCED = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
GATHERED = {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 1}}
SCATTERED = {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 1}}
PLACEMENTS = {"reduced": (1, 0), "gathered": (1, 1), "scattered": (1, 0)}
LAYOUTS = {"reduced": REDUCED, "gathered": GATHERED, "scattered": SCATTERED}
PATIENCE = timedelta(seconds=20)


class Recorder:
    """Notes when kernels and collectives start and end on this rank; everything really runs.

    Rank 1 does not begin collective `held` before rank 0 has run kernel `until` to its end: if rank 0 waited for the
    collective where it starts it, that would never be."""

    def __init__(self, rank, held, until):
        self.rank, self.held, self.until = rank, held, until
        self.events, self._kernels, self._collectives = [], 0, 0
        self._store = dist.distributed_c10d._get_default_store()
        self.carry = Messages.__call__

    def compile(self, func, poison):
        """A compiler of kernels that note their number, in the order of the program."""
        kernel, number = find_target("interpret").compile(func, poison), self._kernels
        self._kernels += 1

        def run(*args):
            kernel(*args)
            self.events.append(f"kernel {number}")
            if (self.rank, number) == (0, self.until):
                self._store.set("kernel has run", "yes")

        return run

    def start(self, messages, *args):
        """Stands before the sending."""
        number, self._collectives = self._collectives, self._collectives + 1
        if (self.rank, number) == (1, self.held):
            self._store.wait(["kernel has run"], PATIENCE)
        self.events.append(f"start {number}")
        wait = self.carry(messages, *args)
        return lambda: (wait(), self.events.append(f"end {number}"))


def events(rank, layouts, held, until):
    """What happens in which order when a matmul runs in three slabs."""
    recorder = Recorder(rank, held, until)
    func = mt.annotate(matmul(48, 16, 32, 16, 16, 16), {"x": 2}, LAYOUTS[layouts])
    program = overlapped(lower_to_program(func), 3)
    ranks = in_a_call(ranks_of(program.mesh, None, "cpu"))
    target = Target("interpret", "cpu", False, recorder.compile)
    launch = RankLaunch(RankBackend(program, target, ranks, Faults(ranks, "matmul")))
    a, b = torch.randn(48, 32), torch.randn(32, 16)
    dims = PLACEMENTS[layouts]
    given = {name: t.chunk(2, dim)[rank].contiguous() for name, t, dim in zip("AB", (a, b), dims, strict=True)}
    Messages.__call__ = lambda *args: recorder.start(*args)
    try:
        c = launch(given, {})["C"]
    finally:
        Messages.__call__ = recorder.carry
    expected = a @ b if layouts == "reduced" else (a @ b).chunk(2, 1)[rank]
    torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-4)
    return recorder.events


def bits_of_bulk(rank, target):
    """Slabs on ranks give the bits of bulk on ranks and on the virtual mesh; `auto` decides alike on all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    a, b = torch.randn(75, 64), torch.randn(64, 32)
    for name, layouts in LAYOUTS.items():
        func = mt.annotate(matmul(75, 32, 64, 16, 16, 16), {"x": 2}, layouts)
        da, db = (distribute_tensor(t, mesh, [Shard(dim)]) for t, dim in zip((a, b), PLACEMENTS[name], strict=True))
        expected = mt.compile(func, target=target, overlap="off")(a, b)
        for overlap in ("off", "auto", 1, 2, 4):
            kern = mt.compile(func, target=target, overlap=overlap)
            for _ in range(2):
                c = kern(da, db)
                assert torch.equal(pure(c.full_tensor()), pure(expected)), (name, overlap)
            text = kern.explain()
            assert ("start " in text) == (overlap in (2, 4)), text
            if overlap == "auto":
                assert "in bulk: " in text
                assert "too few" in text or "gloo with" in text, text
    return True


def large(rank):
    """Slabs that are sent chunk by chunk, and others."""
    func = mt.annotate(matmul(2048, 1536, 64, 64, 64, 32), {"x": 2}, REDUCED)
    a, b = torch.randn(2048, 64), torch.randn(64, 1536)
    parts = (a[:, rank * 32 :][:, :32].contiguous(), b[rank * 32 :][:32].contiguous())
    results = [mt.compile(func, target="c", overlap=overlap).local(*parts) for overlap in ("off", 2, 4)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], a @ b, rtol=1e-4, atol=1e-4)


def different_overlap(rank):
    """The ranks were told different things."""
    func = mt.annotate(matmul(48, 16, 32, 16, 16, 16), {"x": 2}, REDUCED)
    kern = mt.compile(func, target="interpret", overlap="off" if rank == 0 else "auto")
    return refusal(lambda: kern.local(torch.ones(48, 16), torch.ones(16, 16)))


def raises_in_a_slab(rank):
    """Rank 1 raises in its second slab; rank 0 waits for what it would have sent."""
    calls = []

    def compiler(func, poison):
        kernel = find_target("interpret").compile(func, poison)

        def run(*args):
            calls.append(0)
            if rank == 1 and len(calls) == 2:
                raise ValueError("on purpose")
            kernel(*args)

        return run

    func = mt.annotate(matmul(48, 16, 32, 16, 16, 16), {"x": 2}, REDUCED)
    program = overlapped(lower_to_program(func), 3)
    ranks = ranks_of(program.mesh, None, "cpu")
    ranks.meet()
    target = Target("interpret", "cpu", False, compiler)
    launch = RankLaunch(RankBackend(program, target, ranks, Faults(ranks, "matmul")))
    inputs = {"A": torch.ones(48, 16), "B": torch.ones(16, 16)}
    try:
        with ranks.calls.lane() as lane:
            lane.run(1)
            launch(inputs, {})
    except ValueError as error:  # a MeshTensorError is one
        assert all(tensor.eq(1).all() for tensor in inputs.values())
        return str(error)
    raise AssertionError("nothing was raised")
