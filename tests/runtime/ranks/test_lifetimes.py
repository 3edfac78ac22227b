"""Kernels, modules and ranks that are older or younger than the process group."""

from functools import partial

import pytest

from . import lifetime_bodies as bodies
from .launcher import run


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (bodies.kept_across_groups, 4),
        (bodies.modules_across_groups, 2),
        (bodies.a_new_process, 3),
        (bodies.meshes_of_other_groups, 2),
        (bodies.forked_processes, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_process_groups_come_and_go(tmp_path, body, count):
    run(partial(body, folder=str(tmp_path)), count, group=False)
