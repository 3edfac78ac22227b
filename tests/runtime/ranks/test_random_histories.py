"""A sample of random histories of training on ranks: `python -m tests.fuzz --of histories` makes others."""

from functools import partial

from . import random_histories as histories
from .launcher import run as on_ranks

NUMBER = 149  # AdamW, ZeRO-3, dropout, batch norm, recomputation; bad states and a bad batch of one rank; saved, loaded


def test_as_on_the_virtual_mesh(tmp_path):
    """Then other ranks go on, whose parameters are split over another axis."""
    made = [histories.make_history(NUMBER, 2)]
    for work in (histories.on_rank, histories.goes_on):
        for refusals in on_ranks(partial(work, made, str(tmp_path)), 2):
            assert refusals == [""]
