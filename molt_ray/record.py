"""Rollouts written as Parquet: one file a step, one record a segment, light fields and heavy columns in the one schema.

Guarantees: payload bytes go from the store to the file in a task of their own, never through the driver.
"""

from __future__ import annotations

from pathlib import Path

import ray

from molt_ray.experience import TOKENS, Pack, Row


@ray.remote(num_cpus=0.1, max_retries=1)
def write_records(path: str, step: int, rows: list[Row]) -> int:
    """Writes the rows and their token columns to `path`; returns the number of records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    refs = list({row.packs[TOKENS].ref: None for row in rows})
    packs: dict[object, Pack] = dict(zip(refs, ray.get(refs, timeout=300), strict=True))
    records = []
    for row in rows:
        columns = {
            name: column.tolist()
            for name, column in packs[row.packs[TOKENS].ref].payload(row.packs[TOKENS].row).items()
        }
        records.append({"step": step, **row.to_record(), **columns})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)
    return len(records)
