"""`python -m tests.models.training [library/name ...]`: models of transformers and timm take three steps as in torch.

Each is trained towards a random target of its first result, without dropout and with batches' statistics, on {2} (the
batch) and {2, 2} (the batch, and Megatron's pairs or the first matrices). Losses are compared at every step, parameters
after the last. Models whose losses in torch itself differ by more between float32 and float64, as those of deep batch
norms over few values do, train in float64. Each runs in a process of its own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor import strategies

from .__main__ import _alone
from .catalogue import architectures
from .check import Outcome

_TRANSFORMERS = ("gpt2", "llama", "mistral", "mixtral", "bert", "t5", "vit", "opt", "qwen2", "phi")
_TIMM = (
    "resnet18",
    "vit_tiny_patch16_224",
    "convnext_atto",
    "mixer_s16_224",
    "efficientnet_b0",
    "swin_tiny_patch4_window7_224",
)
NAMES = (*(f"transformers/{name}" for name in _TRANSFORMERS), *(f"timm/{name}" for name in _TIMM))
STEPS, LOSS, PARAMETERS = 3, 1e-5, 1e-4


class WithTarget(nn.Module):
    """A model that gives its first result's distance to a target."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The mean of squares; the last input is the target."""
        return nn.functional.mse_loss(self.result(*inputs[:-1]), inputs[-1])

    def result(self, *inputs: torch.Tensor) -> torch.Tensor:
        """What the model gives first."""
        made: Any = self.model(**dict(zip(self.names, inputs, strict=True)))
        if isinstance(made, torch.Tensor):
            return made
        return next(iter(made.values())) if isinstance(made, Mapping) else made[0]


def trained(make: Callable[[], Any], title: str) -> Outcome:
    """Three steps on each mesh, compared with torch's."""
    torch.manual_seed(0)
    model, given = make()
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    whole = WithTarget(model, tuple(given))
    inputs = tuple(given.values())
    batch = (*inputs, torch.randn_like(copy.deepcopy(whole).result(*inputs)).detach())
    copy.deepcopy(whole)(*batch).backward()
    _freeze_unused(whole, batch)
    whole, batch = _reproducible(whole, batch)
    step = mt.training_step(whole, None, batch, optimizer="momentum", lr=0.01)
    outcome = Outcome(title, "")
    layouts = {name: {"data": 0} for name in step.inputs}
    for mesh, layout in (({"data": 2}, layouts), ({"data": 2, "model": 2}, _both(step, layouts))):
        outcome.layouts += 1
        wrong = _compared(whole, step, mesh, layout, batch)
        if wrong:
            outcome.wrong.append(f"{mesh}: {wrong}")
        else:
            outcome.right += 1
    return outcome


def _freeze_unused(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    """What has no part in the loss is not trained."""
    probe = copy.deepcopy(model)
    probe(*batch).backward()
    unused = {name for name, parameter in probe.named_parameters() if parameter.grad is None}
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


def _reproducible(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its batch, in float64 if rounding alone changes its losses by more than is compared."""
    wide = copy.deepcopy(model).double(), tuple(t.double() if t.is_floating_point() else t for t in batch)
    try:
        exact = list(_in_torch(copy.deepcopy(wide[0]), wide[1]))
    except (RuntimeError, TypeError):  # parts of it need their own dtypes
        return model, batch
    pairs = zip(_in_torch(copy.deepcopy(model), batch), exact, strict=True)
    return (model, batch) if all(abs(mine - true) <= LOSS * abs(true) for mine, true in pairs) else wide


def _in_torch(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Iterator[float]:
    """The loss of each step, after it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def _both(step: Any, layouts: dict[str, Any]) -> dict[str, Any]:
    """The batch, and Megatron's pairs or else the first weights of two dims."""
    try:
        return strategies.combine(strategies.data_parallel(step), strategies.tensor_parallel(step))
    except mt.MeshTensorError:
        names = [name for name, ours in step.names.items() if ours in step.state and step.state[ours].ndim == 2]
        return layouts | {name: {"model": 0} for name in names[:4] if not name.startswith("opt.")}


def _compared(model: nn.Module, step: Any, mesh: dict[str, int], layout: Any, batch: tuple[torch.Tensor, ...]) -> str:
    """What differs from torch after some step."""
    theirs, run = copy.deepcopy(model), mt.distribute_module(step, mesh, layout, poison=True)
    for number, expected in enumerate(_in_torch(theirs, batch)):
        loss = run(*batch)
        off = abs(float(loss) - expected) / abs(expected)
        if not off <= LOSS:
            return f"the loss of step {number + 1} is {float(loss)}, torch's {expected}"
    state = run.state_dict()
    for name, parameter in theirs.named_parameters():
        off = float((state[name] - parameter.detach()).abs().max())
        if not off <= PARAMETERS:
            return f"{name} is {off:.1e} from torch's"
    return ""


def main() -> int:
    """A line each; 1 if one did not train as in torch."""
    wanted = sys.argv[1:] or NAMES
    outcomes = []
    for one in architectures():
        if one.title in wanted:
            outcomes.append(_alone(lambda one=one: trained(one.make, one.title), one.title))
            said = [outcomes[-1].stopped, *outcomes[-1].wrong]
            print(f"{one.title}: {outcomes[-1].right} of {outcomes[-1].layouts}", *filter(None, said), flush=True)
    return int(any(outcome.wrong or outcome.stopped for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
