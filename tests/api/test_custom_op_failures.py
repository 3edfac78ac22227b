"""Kernels that can't be an operation of torch's, and operations that are called wrongly."""

import pytest
import torch

import mesh_tensor as mt
from tests.refusals import refusal
from tests.runtime.programs import accumulate_kernel
from tests.runtime.ranks.agreement_bodies import matmul_kernel, symbolic_sum
from tests.runtime.ranks.compiled_bodies import wrong_arguments
from tests.runtime.ranks.launcher import run


def test_name_that_is_taken():
    op = mt.as_custom_op(matmul_kernel(), "taken")
    text = refusal(lambda: mt.as_custom_op(matmul_kernel(dtype="float16"), "taken"))
    assert "the operation can't be named 'taken'" in text
    assert "there is an operation of that name, whose callers would run this kernel" in text
    assert op(torch.ones(8, 8), torch.ones(8, 8)).eq(8).all()


@pytest.mark.parametrize("wanted", ["A", "B"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_through_what_is_updated_in_place(wanted, backend):
    """Torch took what was updated for what it was before, and nothing for what was added."""
    kern = mt.compile(mt.annotate(accumulate_kernel(7), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target="interpret")
    op = mt.as_custom_op(kern, f"updating_{wanted}_{backend}")
    a, b = (torch.randn(7, requires_grad=name == wanted) for name in "AB")

    def model(a, b):
        b = b * 1
        op(a, b)
        return b

    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=f"B is updated in place, and {wanted} requires a gradient"):  # torch wraps it
        call(a, b)
    with torch.no_grad():
        assert torch.equal(call(a, b), a + b)
    own = b * 1
    text = refusal(lambda: getattr(torch.ops.mesh_tensor, f"updating_{wanted}_{backend}")(a, own))
    assert f"B is updated in place, and {wanted} requires a gradient" in text
    assert torch.equal(own, b)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.jacrev])
def test_transforms(transform):
    """Torch took tangents for zeros."""
    op = mt.as_custom_op(matmul_kernel(), f"transformed_by_{transform.__name__}")
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for call in (op, getattr(torch.ops.mesh_tensor, f"transformed_by_{transform.__name__}")):
        text = refusal(lambda call=call: transform(lambda x: call(x, b))(a))
        assert "a tensor inside of torch.func.vmap, grad or jvp" in text
        assert "call it outside of torch.func's transforms" in text
    product = transform(lambda x: x * op(a, b).sum())(a)  # of what is not transformed
    torch.testing.assert_close(product.sum(), 64 * (a @ b).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["two words", "", 3])
def test_no_name(name):
    text = refusal(lambda: mt.as_custom_op(matmul_kernel(), name))
    assert f"the operation can't be named {name!r}" in text
    assert "use a Python identifier" in text


def test_no_kernel():
    assert "as_custom_op takes a MeshKernel, not function" in refusal(lambda: mt.as_custom_op(run, "function"))


def test_symbolic_sizes():
    kern = symbolic_sum()
    for _ in range(2):
        text = refusal(lambda: mt.as_custom_op(kern, "symbolic"))
        assert "MeshKernel(total(A, B), Mesh({\"x\": 2}), target='interpret') has symbolic dims (rows)" in text
        assert "compile it with the sizes built in" in text
        kern(torch.ones(6, 4))


def test_other_sizes_than_compiled_for():
    op = mt.as_custom_op(matmul_kernel(), "other_sizes")
    model = torch.compile(lambda x, w: op(x, w) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    assert model(torch.ones(8, 8), torch.ones(8, 8)).eq(16).all()
    text = refusal(lambda: model(torch.ones(6, 6), torch.ones(6, 6)))
    assert "parameter 'A': shape (6, 6), but expected (8, 8)" in text


def test_wrong_arguments_on_ranks():
    for texts in run(wrong_arguments, 2):
        assert "parameter 'A': on DeviceMesh((x=2), 'cpu', stride=(1,)) of ranks [1, 0], but expected" in texts[0]
        assert "parameter 'B': shape (7, 8), but expected (7, 7)" in texts[1]
        assert "parameter 'B': a Tensor, but other parameters are DTensors" in texts[2]
        assert all("operation of kernel 'matmul_kernel'" in text for text in texts)
