"""AdamW, as PyTorch has it, in its own foreach kernels.

PyTorch's class imports its compiler at the first use: 4 to 11 s on 2 cores before the first step. Equal to it within
rounding (tests/unit/test_trainer.py).
Source: Loshchilov and Hutter 2019, with bias correction.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from forebay.errors import StateError

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8


class AdamW:
    """Steps parameters by their gradients; a parameter without one counts as if it were zeros.

    Attributes:
        learning_rate: May be set between steps.
    """

    def __init__(self, parameters: Iterable[Any], learning_rate: float, *, weight_decay: float = 0.01) -> None:
        self._parameters = list(parameters)
        self.learning_rate, self._weight_decay = learning_rate, weight_decay
        self._steps = 0
        self._means = [torch.zeros_like(one) for one in self._parameters]
        self._squares = [torch.zeros_like(one) for one in self._parameters]

    def zero_grad(self) -> None:
        """Lets the gradients go."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """One step, in place."""
        self._steps += 1
        with torch.no_grad():
            held = self._parameters
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in held]
            torch._foreach_mul_(held, 1 - self.learning_rate * self._weight_decay)
            torch._foreach_lerp_(self._means, gradients, 1 - _BETA_1)
            torch._foreach_mul_(self._squares, _BETA_2)
            torch._foreach_addcmul_(self._squares, gradients, gradients, 1 - _BETA_2)
            scale = torch._foreach_sqrt(self._squares)
            torch._foreach_div_(scale, math.sqrt(1 - _BETA_2**self._steps))
            torch._foreach_add_(scale, _EPS)
            torch._foreach_addcdiv_(held, self._means, scale, -self.learning_rate / (1 - _BETA_1**self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Steps and moments, in the parameters' order; the tensors are the ones in use."""
        return {"steps": self._steps, "means": list(self._means), "squares": list(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; its tensors are copied. StateError if it is of other parameters."""
        steps, means, squares = (state.get(name) for name in ("steps", "means", "squares"))
        wanted = [one.shape for one in self._means]
        if type(steps) is not int or not all(_shapes(found) == wanted for found in (means, squares)):
            raise StateError(f"optimizer: expected two moments of {len(wanted)} parameters, got {sorted(state)}.")
        self._steps = steps
        for mine, new in zip(self._means + self._squares, [*(means or ()), *(squares or ())]):
            mine.copy_(new)


def _shapes(found: Any) -> list[Any]:
    return [getattr(one, "shape", None) for one in found] if isinstance(found, list) else []
