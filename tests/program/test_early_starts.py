"""Collectives start early where a product or a kernel can run beside them, and never before what they depend on."""

from dataclasses import replace

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.program.builder import with_lifetimes
from mesh_tensor.program.overlap import early_starts, with_overlap
from mesh_tensor.program.steps import KernelStep
from mesh_tensor.program.verify import verify_program
from mesh_tensor.runtime.virtual.launch import Launch
from mesh_tensor.targets.kernels import find_target
from tests.runtime.programs import add_one_kernel, collective, program, value

MESH = mt.Mesh({"x": 2})
GATHER = replace(collective("all_gather", "G", "W", "x", src_dim=0), bytes=8)


def add_one(src, dst):
    """dst = src + 1, on tiles of 4 elements."""
    return KernelStep(f"{dst}={src}+1", add_one_kernel(4), (src, dst), (), (dst,), 4)


def chain(first, storage="W"):
    """A kernel, then a gather whose result another kernel takes; it may lie in the memory of something else."""
    values = [value(name, (8,), MESH, {"x": 0}) for name in ("A", "B")] + [value("G", (4,), MESH, {"x": 0})]
    values += [value("W", (4,), MESH, {}, storage=storage), value("C", (4,), MESH, {}), value("T", (4,), MESH, {})]
    bulk = program(MESH, values, [first, GATHER, add_one("W", "C")], ["A", "G", ">B", ">C"])
    return replace(bulk, steps=with_lifetimes(bulk.steps, bulk.values, bulk.parameters))


def order(made):
    """The steps that use something; `start` stands before a collective that nobody waits for yet."""
    steps = early_starts([step for step in made.steps if step.uses], made.values)
    return [step.words if step.collective is not step or step.wait else f"start {step.words}" for step in steps]


def test_a_gather_starts_before_a_kernel_that_has_nothing_to_do_with_it():
    gather = "all_gather(G) over x"
    assert order(chain(add_one("A", "B"))) == [
        f"start {gather}",
        "kernel B=A+1",
        f"the end of {gather}",
        "kernel C=W+1",
    ]


@pytest.mark.parametrize(
    ("first", "storage"),
    [(add_one("A", "G"), "W"), (add_one("A", "T"), "T"), (add_one("T", "B"), "T")],
    ids=["it writes what is sent", "it writes where the result goes", "it reads where the result goes"],
)
def test_a_gather_does_not_start_before_a_kernel_that_uses_its_memory(first, storage):
    assert order(chain(first, storage)) == [first.words, "all_gather(G) over x", "kernel C=W+1"]


def test_what_depends_on_a_collective_that_was_moved_starts_when_that_has_ended():
    values = [value("A", (8,), MESH, {"x": 0}), value("B", (8,), MESH, {"x": 0}), value("R", (8,), MESH, {})]
    values += [value("P", (8,), MESH, {}, {"x": "sum"}), value("C", (8,), MESH, {"x": 0}), value("S", (8,), MESH, {})]
    reduce, send = collective("all_reduce", "P", "R", "x", "sum"), collective("all_gather", "B", "S", "x", src_dim=0)
    steps = [reduce, add_one("A", "B"), send, add_one("A", "C")]
    assert order(program(MESH, values, steps, ["A", "P", ">C", ">S", ">R"])) == [
        "start all_reduce(P, sum) over x",
        "kernel B=A+1",
        "start all_gather(B) over x",
        "kernel C=A+1",
        "the end of all_reduce(P, sum) over x",
        "the end of all_gather(B) over x",
    ]


@pytest.mark.parametrize("poison", [False, True])
def test_results_are_those_of_bulk(poison):
    bulk = chain(add_one("A", "B"))
    early = with_overlap(bulk, "auto")
    verify_program(early)
    assert [step.wait for step in early.collectives] == [False]
    given = {"A": torch.randn(8), "G": torch.randn(4), "B": None, "C": None}
    for made in (bulk, early, with_overlap(bulk, "off")):
        results = Launch(made, find_target("interpret"), poison=poison)(given, {})
        torch.testing.assert_close(results, {"B": given["A"] + 1, "C": given["G"] + 1}, rtol=0, atol=0)


def test_what_is_scattered_is_waited_for_when_two_others_have_started():
    """What is sent is as large as all that is made of it: five results of eight elements would all be there at last."""
    values, steps, results = [value("A", (8,), MESH, {"x": 0})], [], []
    for n in range(5):
        values += [value(f"P{n}", (8,), MESH, {}, {"x": "sum"}), value(f"S{n}", (8,), MESH, {"x": 0})]
        scatter = replace(collective("reduce_scatter", f"P{n}", f"S{n}", "x", "sum", dst_dim=0), bytes=16)
        steps += [add_one("A", f"P{n}"), scatter]
        results.append(f">S{n}")
    values.append(value("C", (8,), MESH, {"x": 0}))
    made = order(program(MESH, values, [*steps, add_one("A", "C")], ["A", *results, ">C"]))
    names = [f"reduce_scatter(P{n}, sum) over x" for n in range(5)]
    ends = {name: made.index(f"the end of {name}") for name in names}
    for first, third in zip(names, names[2:], strict=False):
        assert ends[first] == made.index(f"start {third}") + 1
    assert made[-2:] == [f"the end of {name}" for name in names[3:]]
