"""Whether two models speak the same tokens. Imports no torch until it is asked."""

from __future__ import annotations

from pathlib import Path

from engine.errors import UserError
from engine.models.folder import read_config


def check_same_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Raises UserError unless both tokenizers give each token the same id.

    The sizes in config.json may differ: models pad their embeddings with rows that no token has.
    """
    from engine.models.loading import load_tokenizer

    target, draft = (load_tokenizer(folder).get_vocab() for folder in (target_folder, draft_folder))
    if target != draft:
        ids = {token: (target.get(token), draft.get(token)) for token in target.keys() | draft.keys()}
        token, (in_target, in_draft) = min((entry for entry in ids.items() if len(set(entry[1])) > 1), key=lambda entry: entry[0])
        raise UserError(
            f"draft '{draft_folder}': its tokenizer has {len(draft)} tokens, the target's has {len(target)}, and they are not the same "
            f"(token {token!r} has id {in_draft} in the draft, {in_target} in the target); allowed: a model with the target's tokenizer"
        )
    size, needed = read_config(draft_folder)["vocab_size"], max(draft.values()) + 1
    if size < needed:
        raise UserError(f"draft '{draft_folder}': config.json has vocab_size={size}; allowed: at least {needed}, the tokenizer's size")
