"""Which places of which texts a training step looks at, the same on every run.

Each answer is cut into windows of Q queries. An epoch goes through all windows once; windows with as much text before them go together,
so that little is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from jobs.train_draft.shards import Corpus
from jobs.train_draft.unroll import Batch

_POOL = 16  # batches whose windows are sorted by length together

#: (text, index of its first query)
Window = tuple[int, int]


class Batches:
    """Args:
    texts: of the corpus, those to use. batch: windows in one. queries, steps: Q and S.
    """

    def __init__(self, corpus: Corpus, texts: np.ndarray, *, batch: int, queries: int, steps: int, seed: int):
        self._corpus = corpus
        self._batch = batch
        self._queries = queries
        self._steps = steps
        self._seed = seed
        self._windows = _cut(corpus, texts, queries)

    @property
    def per_epoch(self) -> int:
        return max(1, len(self._windows) // self._batch)

    def epoch(self, number: int) -> list[list[Window]]:
        """The windows of each batch, in an order of its own. What does not fill the last one waits for another epoch."""
        rng = np.random.default_rng([self._seed, number])
        order = rng.permutation(len(self._windows))
        most = self._batch * _POOL
        batches = []
        for start in range(0, len(order), most):
            pool = sorted((self._windows[index] for index in order[start : start + most]), key=lambda window: window[1])
            batches += [pool[first : first + self._batch] for first in range(0, len(pool), self._batch)]
        whole = [batch for batch in batches if len(batch) == self._batch] or batches
        return [whole[index] for index in rng.permutation(len(whole))][: self.per_epoch]

    def from_step(self, step: int, rank: int, world: int) -> Iterator[Batch]:
        """Endless: the batches of steps step, step + 1, ... for one of `world` workers."""
        number = step * world + rank
        while True:
            epoch, place = divmod(number, self.per_epoch)
            batches = self.epoch(epoch)
            while place < len(batches):
                yield self.read(batches[place])
                place += world
            number = (epoch + 1) * self.per_epoch + place - len(batches)

    def read(self, windows: Sequence[Window]) -> Batch:
        """The tensors of some windows."""
        corpus, num_places = self._corpus, self._queries + self._steps - 1
        tokens, features, positions, lengths = [], [], [], []
        token_BT = torch.zeros(len(windows), num_places, dtype=torch.int64)
        exists_BT = torch.zeros(len(windows), num_places, dtype=torch.bool)
        log_z_BT = torch.zeros(len(windows), num_places)
        hidden_BTH = None
        for row, (text, first) in enumerate(windows):
            token_n = corpus.token(text)
            num_laws = min(num_places, len(token_n) - 2 - first)  # nothing is drafted after a text's last token
            num_pairs = first + min(self._queries, num_laws)
            tokens.append(token_n[1 : num_pairs + 1])
            features.append(corpus.feature(text, num_pairs))
            positions.append(torch.arange(num_pairs))
            lengths.append(num_pairs)
            hidden, log_z = corpus.law(text, first + 1, first + 1 + num_laws)
            if hidden_BTH is None:
                hidden_BTH = hidden.new_zeros(*token_BT.shape, hidden.shape[-1])
            token_BT[row, :num_laws] = token_n[first + 1 : first + 1 + num_laws]
            hidden_BTH[row, :num_laws], log_z_BT[row, :num_laws], exists_BT[row, :num_laws] = hidden, log_z, True
        return Batch(
            context_BL=torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1),
            token_N=torch.cat(tokens),
            feature_NF=torch.cat(features),
            position_N=torch.cat(positions),
            first_B=torch.tensor([first for _, first in windows]),
            token_BT=token_BT,
            hidden_BTH=hidden_BTH,
            log_z_BT=log_z_BT,
            exists_BT=exists_BT,
        )


def _cut(corpus: Corpus, texts: np.ndarray, queries: int) -> list[Window]:
    windows = []
    for text in texts.tolist():
        first, stop = int(corpus.answer_start_D[text]) - 1, int(corpus.length_D[text]) - 2
        windows += [(text, start) for start in range(first, stop, queries)]
    return windows
