"""A sample of random histories of training on ranks: `make fuzz` makes others."""

from functools import partial

from . import random_histories as histories
from .launcher import run as on_ranks

# Between them: ZeRO-3, microbatches, a dynamic loss scale; Lion, batch norms, two axes; all events but a bad batch.
NUMBERS = (2, 34)


def test_as_on_the_virtual_mesh(tmp_path):
    made = [histories.make_history(number, 2) for number in NUMBERS]
    for work in (histories.on_rank, histories.goes_on):
        for refusals in on_ranks(partial(work, made, str(tmp_path)), 2):
            assert refusals == [""] * len(made)
