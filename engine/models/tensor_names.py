"""Names of the tensors in a model folder, without reading one: they tell a draft head from a language model."""

from __future__ import annotations

import zipfile
from pathlib import Path

from safetensors import safe_open

from engine.errors import UserError
from engine.models.folder import BROKEN_FILE, find_weights, read_weight_map


def read_tensor_names(folder: Path) -> set[str]:
    """Raises UserError when there are no weights, or a file is missing or cannot be read. Imports torch for a pytorch_model.bin only."""
    file = find_weights(folder)
    if file.suffix == ".json":
        return set(read_weight_map(file))
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy") as tensors:
                return set(tensors.keys())
        import torch

        # files of old versions are no zip archives and cannot be mapped: they are read whole
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except BROKEN_FILE as error:
        raise UserError(f"'{folder}': '{file.name}' cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    check_state_dict(content, f"'{folder}': '{file.name}'")
    return set(content)


def check_pickled_weights(folder: Path) -> None:
    """Raises UserError where a pickled weight file of a model folder holds other things than named tensors."""
    import torch

    file = find_weights(folder)
    for name in sorted(set(read_weight_map(file).values())) if file.suffix == ".json" else [file.name]:
        if name.endswith(".bin"):
            check_state_dict(torch.load(folder / name, map_location="cpu", weights_only=True), f"'{folder}': '{name}'")


def check_state_dict(content: object, what: str) -> None:
    """Raises UserError unless it is named tensors and nothing else; `what` it is begins the message."""
    from torch import Tensor

    is_dict = isinstance(content, dict)
    if not is_dict or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()):
        raise UserError(f"{what} holds other things than named tensors; allowed: a state_dict, nothing around it")
