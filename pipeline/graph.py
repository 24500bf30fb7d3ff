"""The Ray Data graph: read chunks -> tables of a few rows -> engine actors -> tables of results, which come to the driver.

The form of each call is what keeps every slot full and every row there once with Ray 2.60. Small tables: a long row holds up only
its neighbours. One table per call: a retry is exact. Calls in threads: they share the engine. No CPU asked for: an actor that holds
one can starve the readers. The driver alone writes: when it is killed, nobody is left who could.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata

from engine.errors import EngineError
from pipeline.columns import Columns
from pipeline.generate import GenerateRows, RowOptions
from pipeline.schema import SCHEMA
from pipeline.sources import Chunk, read_chunk

ROWS_PER_CALL = 8
_AUTO_SLOTS = {"cpu": 16, "gpu": 64}  # what the engine picks for max_batch=auto
_READ_BUFFER_BLOCKS = 64
_PRIVATE_NAMES = ("_max_num_blocks_in_streaming_gen_buffer", "custom_execution_callback_classes")


def prepare_context(callback: type) -> DataContext:
    """Ray Data's settings for this process; `callback` sees every step of the execution.

    Raises EngineError when this Ray lacks one of the private names that the pipeline rests on.
    """
    context = DataContext.get_current()
    for name in _PRIVATE_NAMES:
        if not hasattr(context, name):
            raise EngineError(f"ray {ray.__version__} has no DataContext.{name}; allowed: ray>=2.60,<2.61")
    context._max_num_blocks_in_streaming_gen_buffer = _READ_BUFFER_BLOCKS  # 2 by default: a reader then starves the engine
    context.custom_execution_callback_classes = [callback]
    context.execution_no_progress_timeout_s = -1  # a row may take longer than any limit
    context.enable_progress_bars = False
    context.print_on_execution_start = False

    return context


def stream_results(
    chunks: list[Chunk], columns: Columns, *, settings, options: RowOptions, ledger, num_workers: int, gpus_per_worker: float
) -> Iterator[pa.Table]:
    """Reads and generates; gives tables of `SCHEMA` as they are finished, with the metadata of `GenerateRows`."""
    slots = _AUTO_SLOTS["gpu" if gpus_per_worker else "cpu"] if settings.max_batch == "auto" else settings.max_batch
    num_calls = max(2, -(-2 * slots // ROWS_PER_CALL))
    rows = ray.data.read_datasource(ChunkSource(chunks, columns), override_num_blocks=len(chunks))
    rows = rows.repartition(target_num_rows_per_block=ROWS_PER_CALL)
    results = rows.map_batches(
        GenerateRows,
        fn_constructor_kwargs={"settings": settings, "ledger": ledger, "options": options},
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=0,
        num_gpus=gpus_per_worker or None,
        compute=ActorPoolStrategy(
            size=num_workers,
            max_concurrent_calls_per_actor=num_calls,
            max_tasks_in_flight_per_actor=num_calls + num_calls // 2,
            enable_true_multi_threading=True,
        ),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(settings.threads)}},  # Ray sets 1 for an actor that asks for no CPU
    )
    for bundle in results.iter_internal_ref_bundles():  # not iter_batches: it gives a table only once it has the next
        for entry in bundle.blocks:
            table = BlockAccessor.for_block(ray.get(entry.ref)).to_arrow()
            if table.num_rows:  # one of which nothing was begun has no columns either
                yield table.select(SCHEMA.names).cast(SCHEMA.with_metadata(table.schema.metadata))


class ChunkSource(Datasource):
    """One read task per chunk."""

    def __init__(self, chunks: list[Chunk], columns: Columns):
        super().__init__()
        self._chunks = chunks
        self._columns = columns

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context=None) -> list[ReadTask]:
        return [
            ReadTask(_reader(chunk, self._columns), BlockMetadata(None, None, None, None), per_task_row_limit=per_task_row_limit)
            for chunk in self._chunks
        ]


def _reader(chunk: Chunk, columns: Columns) -> Callable:
    return functools.partial(read_chunk, chunk, columns)
