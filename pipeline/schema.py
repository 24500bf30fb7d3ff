"""The fixed Arrow schema of the output, and the records that fill it. One schema for every file, whatever the rows hold."""

from __future__ import annotations

import pyarrow as pa

from engine.params import Cycle, Result

SCHEMA_VERSION = 1

_CYCLE = pa.struct([pa.field(name, pa.int32()) for name in Cycle._fields])

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sample", pa.int32()),
        ("row_index", pa.int64()),
        ("status", pa.string()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("num_output_tokens", pa.int32()),
        ("num_cycles", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("cycles", pa.list_(_CYCLE)),
        ("logprobs", pa.list_(pa.float32())),
        ("seed", pa.int64()),
        ("worker", pa.string()),
        ("latency_s", pa.float32()),
        ("meta", pa.string()),
    ]
)


def make_record(result: Result, *, row_index: int, meta: str | None, worker: str, depth: int) -> dict:
    """One output row. `depth` is the configured draft depth: the histogram has depth + 1 entries, so that sets can be added up."""
    failed = result.error is not None
    cycles = [] if failed else result.cycles or []
    histogram = [0] * (max([depth, *(cycle.accepted for cycle in cycles)]) + 1)
    for cycle in cycles:
        histogram[cycle.accepted] += 1
    return {
        "id": result.id,
        "sample": result.sample,
        "row_index": row_index,
        "status": "error" if failed else "ok",
        "error_type": result.error.type if failed else None,
        "error_message": clean_text(result.error.message) if failed else None,
        "prompt": clean_text(result.prompt),
        "text": None if failed else clean_text(result.text),
        "token_ids": None if failed else result.token_ids,
        "finish_reason": "error" if failed else result.finish_reason,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_output_tokens": 0 if failed else len(result.token_ids),
        "num_cycles": len(cycles),
        "num_draft_tokens": sum(cycle.drafted for cycle in cycles),
        "num_accepted_tokens": sum(cycle.accepted for cycle in cycles),
        "acceptance_histogram": None if failed else histogram,
        "cycles": None if failed else [cycle._asdict() for cycle in cycles],
        "logprobs": None if failed else result.logprobs,
        "seed": result.seed,
        "worker": worker,
        "latency_s": result.latency_s,
        "meta": meta,
    }


def make_table(records: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(records, schema=SCHEMA)


def clean_text(text: str | None) -> str | None:
    """Text that Arrow can hold: a lone surrogate, which UTF-8 has no bytes for, becomes "?"."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")
