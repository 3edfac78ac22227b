"""What of a torch model has a say in gradients that its forward doesn't tell: hooks, and functions with a backward of
their own. They may change nothing in the gradients of an example, and others later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mesh_tensor.base.errors import listing, refuse

_ON_TENSORS = torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook
_TORCHS = "torch."  # checkpoints, what is compiled: their gradients are those of what they compute


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a model with hooks on gradients of its parameters and modules."""
    if hooked := _hooked(model):
        _refuse_hooks(f"{listing(hooked)} with hooks on gradients")


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """Refuse a model that sets hooks on the gradients of what it computes, as it runs within."""
    seen = _Hooks()
    with seen:
        yield
    if seen.count:
        _refuse_hooks(f"the model sets hooks on gradients of what it computes ({seen.count})")


def refuse_functions(loss: Any) -> None:
    """Refuse a loss that was computed by functions with backwards of their own, as far as autograd has recorded it."""
    if found := _functions(loss):
        refuse(
            f"{listing(found)} with a backward of its own (torch.autograd.Function)",
            where="training_step",
            why="a step is recorded from what its forward computes, and would have the gradients of that",
            fix="write it with torch's operators (y + (x - y).detach() gives y, with the gradient of x)",
        )


def _refuse_hooks(what: str) -> None:
    refuse(
        what,
        where="training_step",
        why="they are torch's alone: a step would leave them out",
        fix="remove them; an optimizer of one's own may do what they do",
    )


def _hooked(model: nn.Module) -> list[str]:
    """The parameters and modules whose functions are called with gradients, or after these were added up."""
    of_parameters = "_backward_hooks", "_post_accumulate_grad_hooks"
    of_modules = "_backward_hooks", "_backward_pre_hooks"
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    found = [name for name, each in trained if any(getattr(each, hooks, None) for hooks in of_parameters)]
    modules = [(name or type(model).__name__, each) for name, each in model.named_modules()]
    return found + [name for name, each in modules if any(getattr(each, hooks, None) for hooks in of_modules)]


class _Hooks(TorchFunctionMode):
    """Counts hooks on gradients that are set within."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        self.count += func in _ON_TENSORS
        return func(*args, **(kwargs or {}))


def _functions(loss: Any) -> list[str]:
    """The names of functions with backwards that are not torch's, in what autograd recorded of a loss."""
    found: dict[str, None] = {}
    ahead = [getattr(loss, "grad_fn", None)]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        own = getattr(type(node), "_forward_cls", None)
        if own is not None and not own.__module__.startswith(_TORCHS):
            found[own.__name__] = None
        following = {other for other, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        ahead += following
    return sorted(found)
