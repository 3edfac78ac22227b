"""What can't be simulated."""

import math

import numpy as np
import pytest
import torch
from tilelang import language as T

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.base.machine import Link, Machine, Memory


def test_nothing_that_runs():
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.simulate(3)
    assert "3 can't be simulated" in str(caught.value)
    assert "mt.compile or mt.distribute_module" in str(caught.value)


def kernel(devices=4):
    layouts = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
    return mt.compile(mt.annotate(matmul(64, 64, 64), mt.Mesh({"x": devices}), layouts), target="interpret")


def test_a_kernel_of_unknown_sizes():
    func = mt.annotate(matmul(T.dynamic("m"), 64, 64), mt.Mesh({"x": 4}), {"A": {"x": 0}, "C": {"x": 0}})
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.simulate(func)
    assert "a kernel with symbolic dims can't be simulated: m" in str(caught.value)


def test_no_machine():
    with pytest.raises(mt.MeshTensorError, match="8 is no machine"):
        mt.simulate(kernel(), 8)
    with pytest.raises(mt.MeshTensorError, match="there is no machine 'h10'; did you mean 'h100'"):
        mt.simulate(kernel(), "h10")


def test_more_devices_than_the_machine_has():
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.simulate(kernel(16), "h100x8")
    assert 'Mesh({"x": 16}) has 16 devices, the machine 8' in str(caught.value)


def test_a_machine_without_a_rate():
    machine = Machine("half", {"float16": 1e12}, (Memory(10**9, 1e11),), (Link("wire", None, 1e9, 1e-5),))
    with pytest.raises(mt.MeshTensorError, match="no rate of operations on float32") as caught:
        mt.simulate(kernel(), machine)
    assert "it has rates for 'float16'" in str(caught.value)


def test_a_machine_without_links():
    with pytest.raises(mt.MeshTensorError, match="nothing connects 4 devices"):
        mt.simulate(kernel(), Machine("alone", {"float32": 1e12}, (Memory(10**9, 1e11),)))


def test_a_rate_that_is_missing_is_to_be_pasted():
    machine = Machine("m", {"bfloat16": 1e12}, [Memory(1 << 30, 1e11)])
    func = mt.annotate(matmul(64, 64, 64), {"x": 1}, {})
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.simulate(func, machine)
    assert "flops={**machine.flops, 'float32': ...}" in str(caught.value)


@pytest.mark.parametrize("most", ["a", -1, 2.5])
def test_no_number_of_what_costs_most(most):
    with pytest.raises(mt.MeshTensorError, match=f"most is '?{most}'?(.|\\n)*how many to name"):
        mt.simulate(kernel(), "h100").why(most)


def test_a_dtype_that_there_is_not():
    with pytest.raises(mt.MeshTensorError, match="no numpy dtype for 'nope'"):
        mt.Machine.preset("h100").peak("nope")


@pytest.mark.parametrize("number", ["a", None, -1, math.nan, math.inf, True, torch.tensor([1.0, 2.0])])
def test_no_numbers_of_what_is_made(number):
    made = mt.simulate(kernel(), "h100")
    with pytest.raises(mt.MeshTensorError, match="(?s)count is .*say how many there are in all"):
        made.per_second(number)
    if number is not None:
        with pytest.raises(mt.MeshTensorError, match="(?s)flops is .*the operations of one device"):
            made.utilisation("float32", number)
    assert made.per_second(np.int64(3)) == made.per_second(3.0)
