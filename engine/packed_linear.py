"""Linear layers whose weights lie in the order in which the processor's matrix product reads them (oneDNN's, on a CPU in bf16).

Else a product over few tokens, which is bound by reading the weights, takes about twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_NUM_TOKENS = 64  # of a product that the order is chosen for; those with other numbers are as fast


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linears(module: nn.Module) -> None:
    """Replaces the linear layers below `module` where they can be packed. Their own weights are let go, but for those that others share."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear([child]))


class PackedLinear(nn.Module):
    """For inference: what linear layers make of one input, side by side. All of them have a bias, or none has."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_TOKENS)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "some of the layers have a bias, and others have none"
        self._bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
