"""Looks at an output as anyone may: all the time, with a plain glob or listing."""

from __future__ import annotations

import threading

import pyarrow as pa

from jobs.chaos.judge import BrokenPart, Key, find_doubled, keys_of, read_table

_SHOWN = 3


class Watcher:
    """A thread that looks again and again. What it may not see is in `complaints`, once each.

    Args:
        output: a jobs.chaos.disk.DiskOutput or jobs.chaos.store.StoreOutput.
    """

    def __init__(self, output, interval_s: float = 0.1):
        self.complaints: list[str] = []
        self.num_looks = 0
        self.num_rows = 0  # at the last look
        self.num_parts = 0
        self._output = output
        self._interval_s = interval_s
        self._known: dict[str, tuple[object, list[Key]]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self) -> None:
        with self._lock:
            keys: dict[str, list[Key]] = {}
            for name, listed in self._output.list_parts().items():
                try:
                    keys[name] = self._keys(name, listed)
                except FileNotFoundError:  # overwritten since it was listed
                    continue
                except BrokenPart as error:
                    self._complain(str(error))
            doubled = find_doubled(keys)
            if doubled:
                self._complain(f"{len(doubled)} keys are there twice: {'; '.join(doubled[:_SHOWN])}")
            self.num_looks += 1
            self.num_parts = len(keys)
            self.num_rows = sum(map(len, keys.values()))

    def read_all(self) -> pa.Table:
        """Every row that is there. Raises BrokenPart."""
        tables = [read_table(name, self._output.read(name)) for name in self._output.list_parts()]
        return pa.concat_tables(tables).replace_schema_metadata(None)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _keys(self, name: str, listed: object) -> list[Key]:
        version, data = self._output.read_changed(name, listed, self._known.get(name, (None,))[0])
        if data is not None:
            self._known[name] = (version, keys_of(read_table(name, data)))
        return self._known[name][1]

    def _complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.look()
