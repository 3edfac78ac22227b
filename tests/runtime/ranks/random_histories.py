"""Random histories of training on ranks: steps, steps that are refused on all ranks or on one, states taken, loaded and
saved, models evaluated, in any order. After each the ranks have the bits of the virtual mesh; what they saved, other
ranks go on from."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import mesh_tensor as mt
from tests.random_kernels.check import RIGHT, Outcome
from tests.random_training import CLASSES, RATE, Model, TrainingCase, make_training_case
from tests.refusals import refusal

from .launcher import run as on_ranks
from .support import pure

EVENTS = ("run", "run", "state", "load", "save", "bad batch", "not finite", "bad on one", "bad state", "evaluate")


class Stateful(nn.Module):
    """A random model that may drop, and may keep statistics."""

    def __init__(self, model: Model, width: int, drops: float, keeps: bool) -> None:
        super().__init__()
        self.model, self.drop = model, nn.Dropout(drops)
        self.norm = nn.BatchNorm1d(width) if keeps else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2)))


@dataclass(frozen=True)
class History:
    """What is trained on `case.mesh`, by how many ranks, and what happens; then on another mesh of `after` ranks."""

    case: TrainingCase
    options: dict[str, Any]
    drops: float
    keeps: bool
    events: tuple[str, ...]
    after: dict[str, int]

    @property
    def ranks(self) -> tuple[int, int]:
        return math.prod(self.case.mesh.values()), math.prod(self.after.values())

    def step(self) -> tuple[mt.TrainingStep, Stateful]:
        model = Stateful(self.case.model(), self.case.width, self.drops, self.keeps).to(self.case.dtype)
        x, y = self.batch(0)
        return mt.training_step(
            model, self.case.loss, (x, y), optimizer=self.case.rule, check=False, **self.options
        ), model

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(*self.case.batch, self.case.width, generator=generator).to(self.case.dtype)
        return x, torch.randint(0, CLASSES, self.case.batch[:1], generator=generator)

    def layouts(self, mesh: dict[str, int]) -> dict[str, dict[str, int]]:
        ours = {name if name == "x" else f"model.{name}": layout for name, layout in self.case.layouts.items()}
        return {name: layout for name, layout in ours.items() if set(layout) <= set(mesh)}


def make_history(number: int, count: int | None = None) -> History:
    """The history of a number, by `count` ranks at first; None: any."""
    random = Random(f"history {number}")
    meshes: list[dict[str, int]] = [{"d": 2}, {"d": 3}, {"d": 1, "m": 2}, {"d": 2, "m": 2}, {"d": 4}]
    mesh = random.choice([mesh for mesh in meshes if count in (None, math.prod(mesh.values()))])
    case = make_training_case(number)
    layouts = {"x": {"d": 0}}
    for name, parameter in Model(Random(number), case.width).named_parameters():
        if random.random() < 0.4:
            layouts[name] = {random.choice(list(mesh)): random.randrange(parameter.ndim)}
    case = replace(case, mesh=mesh, layouts=layouts)
    drawn = {
        "schedule": partial(_fading, random.uniform(0.3, 1.0)),
        "loss_scale": random.choice((8.0, "dynamic")),
        "reduce_dtype": "bfloat16",
        "seed": random.randrange(9),
    }
    options = case.options | {name: value for name, value in drawn.items() if random.random() < 0.3}
    if case.optimizer == "adamw" and random.random() < 0.3:
        case, options = replace(case, optimizer="lion"), {**options, "lr": RATE}
    keeps = random.random() < 0.4 and "accumulate" not in options
    events = ("run", *random.choices(EVENTS, k=random.randint(3, 7)), "run")
    after = random.choice(({"d": 2}, {"d": 1, "m": 2}) if count else ({"d": 2}, {"d": 3}, {"d": 1, "m": 2}, {"d": 1}))
    return History(case, options, random.choice((0.0, 0.3)), keeps, events, after)


def _fading(factor: float, step: int) -> float:
    return factor**step


@dataclass
class _Both:
    """The same training on ranks and on a virtual mesh."""

    history: History
    mesh: dict[str, int]
    rank: int
    folder: str
    taken: tuple[dict[str, Any], dict[str, Any]] | None = None
    batches: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.step, self.model = self.history.step()
        self.ranks = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        layouts = self.history.layouts(self.mesh)
        self.virtual = mt.distribute_module(self.step, self.mesh, layouts)
        self.real = mt.distribute_module(self.step, self.ranks, layouts)

    def happen(self, event: str) -> None:
        """What it is called, then the comparison of all state."""
        _EVENTS[event](self)
        whole, parts = self.virtual.state_dict(), self.real.state_dict()
        assert whole.keys() == parts.keys()
        assert (self.real.steps, self.real.skipped) == (self.virtual.steps, self.virtual.skipped)
        assert self.real.loss_scale == self.virtual.loss_scale
        for name, part in parts.items():
            made = part.full_tensor() if isinstance(part, DTensor) else part
            assert torch.equal(pure(made), pure(whole[name])), f"{name}: {(made - whole[name]).abs().max()}"

    def run(self) -> None:
        self.batches += 1
        batch = self.history.batch(self.batches)
        found, wanted = self.real(*batch), self.virtual(*batch)
        assert torch.equal(pure(found), pure(wanted)), f"the loss is {found.item()}, but {wanted.item()}"

    def state(self) -> None:
        self.taken = self.real.state_dict(full=self.batches % 2 == 0), self.virtual.state_dict()

    def load(self) -> None:
        if self.taken is None:
            self.state()
        assert self.taken is not None
        self.real.load_state_dict(self.taken[0])
        self.virtual.load_state_dict(self.taken[1])

    def save(self) -> None:
        """And load what was saved at once, into tensors of before the last step."""
        folder = f"{self.folder}/after {self.batches}"
        checkpoint.save(self.real.state_dict(), checkpoint_id=folder)
        before = self.real.state_dict()
        self.run()
        checkpoint.load(before, checkpoint_id=folder)
        whole = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in before.items()
        }
        self.real.load_state_dict(before)
        self.virtual.load_state_dict(whole)

    def bad_batch(self) -> None:
        x, y = self.history.batch(0)
        said = [refusal(lambda run=run: run(x[:, :, 1:], y)) for run in (self.real, self.virtual)]
        assert all(str(tuple(x.shape)) in text for text in said), said

    def not_finite(self) -> None:
        x, y = self.history.batch(0)
        x[-1] = math.nan  # of which dropouts leave some
        for run in (self.real, self.virtual):
            assert "the loss is nan" in refusal(lambda run=run: run(x, y))

    def bad_on_one(self) -> None:
        """One rank's batch is another size; then all go on together."""
        x, y = self.history.batch(0)
        refusal(lambda: self.real(x[:, :, 1:] if self.rank == 0 else x, y))
        mt.resume(self.ranks)

    def bad_state(self) -> None:
        for run in (self.real, self.virtual):
            state = run.state_dict()
            del state["model.classes.weight"]
            assert "'model.classes.weight' is missing" in refusal(
                lambda run=run, state=state: run.load_state_dict(state)
            )

    def evaluate(self) -> None:
        """What the model gives that was trained so far: as torch has it, from the state of the ranks."""
        whole = self.real.state_dict(full=True)
        self.model.load_state_dict({**self.model.state_dict(), **{n: whole[n] for n, _ in _owned(self.model, whole)}})
        was, x = self.model.training, self.history.batch(0)[0]
        self.model.eval()
        with torch.no_grad():
            module, expected = mt.from_torch(torch.export.export(self.model, (x,))), self.model(x)
        run = mt.distribute_module(module, self.ranks, {"x": {"d": 0}})
        close = (1e-4, 1e-5) if expected.itemsize >= 4 else (3e-2, 3e-2)
        torch.testing.assert_close(run(x), expected, rtol=close[0], atol=close[1])
        self.model.train(was)


def _owned(model: nn.Module, whole: dict[str, Any]) -> Sequence[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name in whole]


_EVENTS: dict[str, Callable[[_Both], None]] = {
    "run": _Both.run,
    "state": _Both.state,
    "load": _Both.load,
    "save": _Both.save,
    "bad batch": _Both.bad_batch,
    "not finite": _Both.not_finite,
    "bad on one": _Both.bad_on_one,
    "bad state": _Both.bad_state,
    "evaluate": _Both.evaluate,
}


def on_rank(histories: Sequence[History], folder: str, rank: int) -> list[str]:
    """On one of the ranks of the first meshes: what of each history was refused; its last state is saved."""
    return [_refused(partial(_first, history, f"{folder}/{n}", rank)) for n, history in enumerate(histories)]


def goes_on(histories: Sequence[History], folder: str, rank: int) -> list[str]:
    """On one of the ranks of the other meshes, from what was saved."""
    return [_refused(partial(_second, history, f"{folder}/{n}", rank)) for n, history in enumerate(histories)]


def _refused(work: Callable[[], None]) -> str:
    try:
        work()
    except mt.MeshTensorError as error:
        return str(error)
    return ""


def _first(history: History, folder: str, rank: int) -> None:
    both = _Both(history, history.case.mesh, rank, folder)
    for number, event in enumerate(history.events):
        try:
            both.happen(event)
        except Exception as error:
            raise AssertionError(f"event {number} of {history}") from error
    checkpoint.save(both.real.state_dict(), checkpoint_id=folder)


def _second(history: History, folder: str, rank: int) -> None:
    both = _Both(history, history.after, rank, folder)
    state = both.real.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    both.real.load_state_dict(state)
    both.virtual.load_state_dict(both.real.state_dict(full=True))
    both.batches = 100
    for _ in range(2):
        both.happen("run")


def run(history: History) -> Outcome:
    """What becomes of one history."""
    try:
        with TemporaryDirectory() as folder:
            first, second = history.ranks
            found = on_ranks(partial(on_rank, [history], folder), first)[0][0]
            found = found or on_ranks(partial(goes_on, [history], folder), second)[0][0]
    except (Exception, pytest.fail.Exception):
        return Outcome("wrong", traceback.format_exc())
    return Outcome("refused", found) if found else RIGHT
