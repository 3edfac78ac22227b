"""Kernels on ranks: DTensors and local tensors in and out, the same bits as on the virtual mesh."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from . import kernel_bodies as bodies
from .launcher import run
from .random_compositions import compositions


def test_k_split_matmul():
    run(bodies.k_split_matmul, 2)


@pytest.mark.parametrize(("sizes", "step"), [((2,), 9), ((4,), 16), ((2, 2), 13)])
def test_sample_of_the_sweep(sizes, step):
    before = partial(bodies.points_of_the_sweep, sizes, step)
    ran = run(partial(bodies.sample_of_the_sweep, sizes=sizes), math.prod(sizes), before=before)
    assert min(ran) > 4


def test_random_compositions():
    before = partial(compositions, (3,), range(6))
    ran = run(partial(bodies.sample_of_the_sweep, sizes=(3,)), 3, before=before)
    assert min(ran) > 3


@pytest.mark.parametrize(
    "body",
    [
        bodies.partial_inputs_and_outputs,
        bodies.strict_and_mixed,
        bodies.in_and_out,
        bodies.unused_parameters,
        bodies.unused_parameters_of_cut_kernels,
        bodies.local_tensors,
        bodies.symbolic_sizes,
        bodies.inference_mode,
        bodies.carried_states,
    ],
    ids=lambda body: body.__name__,
)
def test_on_two_ranks(body):
    run(body, 2)


def test_whole_blocks():
    run(bodies.whole_blocks, 3)


@pytest.mark.parametrize("body", [bodies.results_that_are_made, bodies.mesh_tensors], ids=lambda body: body.__name__)
def test_on_four_ranks(body):
    run(body, 4)


def test_docs_page(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "ranks.md"
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run(partial(bodies.docs_page, code=str(script), port=store.port), 2, group=False)
