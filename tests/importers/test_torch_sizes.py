"""A model that decides by sizes is recorded with one way: the module takes the sizes of that one, and no others."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import mesh_tensor as mt


class ByMost(nn.Module):
    def forward(self, a):
        return a * 2 if a.shape[0] <= 8 else a * 3


class ByRest(nn.Module):
    def forward(self, a):
        return a * 2 if a.shape[0] % 2 == 0 else a * 3


class ByOther(nn.Module):
    def forward(self, a, b):
        return a.sum() + b.sum() if a.shape[0] > b.shape[0] else a.sum() - b.sum()


class OfNested(nn.Module):
    def forward(self, a, d, *, o=None):
        small = a[0].shape[0] < 50 and d["k"][0].shape[0] % 2 == 1 and o.shape[0] > a[0].shape[0]
        return a[0] + d["k"][1] if small else a[0]


class InFours(nn.Module):
    def forward(self, a):
        return a.view(-1, 4, 8).sum(1)


OPEN = {0: Dim.AUTO}
NESTED = ([OPEN], {"k": (OPEN, OPEN)}, OPEN)


def rows(*counts):
    return tuple(torch.randn(count, 8) for count in counts)


def nested(a, k, o):
    given, first, second, last = rows(a, k, a, o)
    return ([given], {"k": (first, second)}), {"o": last}


@cache
def exported(number, strict):
    model, (args, kwargs), shapes, *_ = CASES[number]
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)


def through_a_file(program, tmp_path):
    torch.export.save(program, tmp_path / "program.pt2")
    return torch.export.load(tmp_path / "program.pt2")


CASES = [
    (ByMost(), (rows(4), {}), (OPEN,), (rows(8), {}), (rows(9), {}), "9 (dim 0 of 'a')"),
    (ByMost(), (rows(4), {}), ({0: Dim("b", max=8)},), (rows(1), {}), (rows(9), {}), "<= 8"),
    (ByMost(), (rows(9), {}), (OPEN,), (rows(12), {}), (rows(8), {}), ">= 9"),
    (ByRest(), (rows(4), {}), (OPEN,), (rows(6), {}), (rows(5), {}), "% 2 == 0"),
    (ByOther(), (rows(4, 3), {}), (OPEN, OPEN), (rows(7, 2), {}), (rows(3, 5), {}), "5 (dim 0 of 'b')"),
    (InFours(), (rows(8), {}), (OPEN,), (rows(12), {}), (rows(10), {}), "% 32 == 0"),
    (InFours(), (rows(8), {}), ({0: 4 * Dim("q", max=8)},), (rows(32), {}), (rows(36), {}), "<= 32"),
    (OfNested(), nested(6, 3, 9), NESTED, nested(7, 5, 8), nested(7, 4, 8), "% 2 == 1"),
    (OfNested(), nested(6, 3, 9), NESTED, nested(49, 5, 50), nested(50, 5, 60), "< 50"),
    (OfNested(), nested(6, 3, 9), NESTED, nested(6, 3, 7), nested(6, 3, 6), "(dim 0 of 'o')"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_sizes_are_those_that_torch_takes(number, loaded, strict, tmp_path):
    model, _, _, (good, by_name), (bad, bad_by_name), told = CASES[number]
    program = exported(number, strict)
    module = mt.from_torch(through_a_file(program, tmp_path) if loaded else program)
    for mesh in ({"x": 1}, {"x": 2}):
        run = mt.distribute_module(module, mesh, {})
        torch.testing.assert_close(run(*good, **by_name), model(*good, **by_name))
        with pytest.raises(mt.MeshTensorError) as error:
            run(*bad, **bad_by_name)
        assert told in str(error.value)


def test_the_module_alone_has_the_conditions_wherever_it_goes(tmp_path):
    module = mt.from_torch(torch.export.export(ByRest(), rows(4), dynamic_shapes=(OPEN,)))
    mt.save_module(module.mod, tmp_path / "module.json")
    saved = mt.load_module(tmp_path / "module.json")
    mt.save(mt.distribute_module(module.mod, {"x": 2}, {"a": {"x": 0}}), tmp_path / "run")
    for run in (mt.distribute_module(saved, {"x": 2}, {"a": {"x": 0}}), mt.load(tmp_path / "run")):
        (a,) = rows(6)
        torch.testing.assert_close(run(a), a * 2)
        with pytest.raises(mt.MeshTensorError, match="% 2 == 0"):
            run(*rows(5))
    with pytest.raises(mt.MeshTensorError, match="% 2 == 0"):
        mt.run_sequential(module.mod, rows(5))


class Numbers(nn.Module):
    """What is computed of sizes: fractions, numbers of elements, places from the end, numbers that go down."""

    def forward(self, a, b):
        n, k = a.shape[0], b.shape[0]
        down = torch.arange(n - 1, -1, -1)
        return (
            a * n**-0.5 + 1.0 / n - a.double().mean() * (n / 2),
            torch.where(a > 1 / k, a, k * 0.5).clamp(max=n / k),
            (a.sum() / a.numel(), torch.full((2,), b.numel()), torch.tensor(n), a.reshape(a.numel() // 8, 8)),
            (a[-k:], a[:-k], a[k - 5 :], a[-3 * k :], a[n - 2], a.chunk(2), a.split([k, n - k])),
            (a[down], down, torch.arange(n, 0, -2), a.unfold(0, 3, 1)),
        )


class Resized(nn.Module):
    def forward(self, a):
        image = a[None, None]
        twice, more = (F.interpolate(image, scale_factor=s, mode=m) for s, m in ((2, "nearest"), (3.0, "bilinear")))
        return twice, more, F.interpolate(image, scale_factor=2.0, mode="bicubic", align_corners=True)


@pytest.mark.parametrize(
    ("model", "counts", "others", "loaded"),
    [(Numbers(), (8, 3), (5, 2), False), (Resized(), (6,), (11,), True)],
)
def test_numbers_that_are_made_of_sizes(model, counts, others, loaded, tmp_path):
    open_sizes = ({0: Dim.DYNAMIC},) * len(counts)
    program = torch.export.export(model, rows(*counts), dynamic_shapes=open_sizes, strict=False)
    module = mt.from_torch(through_a_file(program, tmp_path) if loaded else program)
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"a": {"x": 0, "y": 1}}, poison=True)
    for inputs in (rows(*counts), rows(*others)):
        torch.testing.assert_close(run(*inputs), model(*inputs))


@pytest.mark.parametrize(
    "text", ["__import__('os')", "s.real == 1", "[s for s in (1,)] == 1", "(", "max(s, key=s) == 1", "'a' == 'a'"]
)
def test_conditions_of_files_are_read_and_not_trusted(text):
    module = mt.from_torch(torch.export.export(ByRest(), rows(4), dynamic_shapes=(OPEN,)))
    mod = module.mod.clone()
    mod["main"] = mod["main"].with_attr("mesh_tensor_sizes", [text])
    with pytest.raises(mt.MeshTensorError, match="on sizes can't be read"):
        mt.distribute_module(mod, {"x": 2}, {})


def test_a_program_from_a_file_has_the_shapes_of_its_own_inputs(tmp_path):
    model, (x,) = nn.Linear(8, 16), rows(4)
    program = through_a_file(torch.export.export(model, (x,), strict=False), tmp_path)
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"weight": {"x": 0}})
    torch.testing.assert_close(run(x), model(x).detach())


def test_views_of_open_sizes_in_another_order():
    """A size of 1 where an open one stands afterwards."""

    class Heads(nn.Module):
        def forward(self, x):
            return x.view(3, x.shape[2], -1, 4) + 1

    program = torch.export.export(Heads(), (torch.randn(3, 1, 5, 8),), dynamic_shapes=({2: Dim.DYNAMIC},))
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"x": {"x": 0}}, poison=True)
    for n in (5, 7):
        x = torch.randn(3, 1, n, 8)
        torch.testing.assert_close(run(x), Heads()(x))


def test_what_is_repeated_so_often_as_an_open_size_says():
    """Learned rows for each of a batch move nothing where the batch is split."""

    class Induced(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(1, 3, 4))

        def forward(self, x):
            size = x.shape[0]
            return self.rows.repeat(size, 1, 1) @ x.mT, self.rows[0].repeat(size, 2, 1), x.repeat(size, 1, 2)[:size]

    model = Induced()
    program = torch.export.export(model, (torch.randn(4, 5, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"x": {"x": 0}}, poison=True)
    for size in (4, 7):
        x = torch.randn(size, 5, 4)
        for found, expected in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(found, expected.detach())


class Denoised(nn.Module):
    """Spectra under masks of a recurrent layer: torch itself takes both apart by sizes that are numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 3, batch_first=True)

    def forward(self, a):
        found = torch.stft(a, 4, 4, window=torch.ones(4), return_complex=True)
        mask = self.layer(found.abs().mT)[0].mT
        return torch.istft(found * mask, 4, 4, window=torch.ones(4), length=a.shape[1])


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_batches_of_recurrent_layers_and_spectra_stay_open():
    model = Denoised().eval()
    program = torch.export.export(model, (torch.randn(4, 8),), dynamic_shapes=({0: Dim("batch", max=16)},))
    run = mt.distribute_module(mt.from_torch(program), {"x": 2}, {"a": {"x": 0}}, poison=True)
    for batch in (4, 5):
        a = torch.randn(batch, 8)
        torch.testing.assert_close(run(a), model(a).detach())
