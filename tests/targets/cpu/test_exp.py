"""The exponential functions of float32 over every exponent: units in the last place, and what is no number."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.kernel import compile_for_cpu

COUNT = 1 << 22


def applied(function):
    @T.prim_func
    def apply_kernel(X: T.Tensor((COUNT,)), Y: T.Tensor((COUNT,))):
        with T.Kernel(COUNT // 1024, threads=128) as bx:
            for i in T.Parallel(1024):
                Y[bx * 1024 + i] = function(X[bx * 1024 + i])

    return apply_kernel


def samples():
    """Every 2039th bit pattern, the range where results are ordinary, and what is special."""
    patterns = torch.arange(COUNT // 2) * 2039
    everywhere = torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.72283, 88.72284, -103.97, -87.34, 128, 127.99]
    return torch.cat([everywhere, torch.tensor(special), torch.linspace(-152, 130, COUNT // 2 - len(special))])


@pytest.mark.parametrize(("function", "reference"), [(T.exp, torch.exp), (T.exp2, torch.exp2)], ids=["exp", "exp2"])
def test_errors_below_one_unit_in_the_last_place(function, reference):
    x, y = samples(), torch.empty(COUNT)
    compile_for_cpu(applied(function))(x, y)
    exact = reference(x.double())
    rounded = exact.float()
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.isinf(), rounded.isinf())
    finite = rounded.isfinite()
    unit = torch.nextafter(rounded[finite], torch.tensor(torch.inf)).double() - rounded[finite].double()
    unit = unit.clamp(max=2.0**104)
    assert ((y[finite].double() - exact[finite]).abs() / unit).max() < 1
