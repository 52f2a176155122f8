"""Rollouts written as Parquet: one file a step, one record a segment, light fields and heavy columns in the one schema; and read back.

Guarantees: payload bytes go between store and file in a task of their own, never through the driver; what is read back is what was trained,
bit for bit and in its order. The file's metadata (`molt_ray`) holds what else the step was: policy version, dtypes of the columns, the metrics
that came of it, a digest of the weights after it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

from molt_ray.experience import MEDIA, TOKENS, Experience, Pack, PackRef, Payload, Row

RECORD_S = 600.0  # for one file, written or read
METADATA = b"molt_ray"
DRAFT = ".draft"  # ends the name of a file that is not whole yet


def record_file(run: Path, step: int) -> Path:
    """Where a run keeps the record of a step."""
    return run / "rollouts" / f"step-{step:06d}.parquet"


def draft_of(file: Path) -> Path:
    """Its name until it is whole."""
    return file.with_name(f"{file.name}{DRAFT}")


@ray.remote(num_cpus=0.1, max_retries=1)
def write_records(path: str, step: int, rows: list[Row], notes: dict[str, Any]) -> int:
    """Writes the rows and their columns to `path`; returns the number of records. `notes`: JSON, kept in the file's metadata.

    Columns of the family `tokens` have their own names, others FAMILY.NAME; a segment without a family has nulls there. An image is written
    once in a file, with the first segment that shows it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    refs = list({where.ref: None for row in rows for where in row.packs.values()})
    packs: dict[object, Pack] = dict(zip(refs, ray.get(refs, timeout=RECORD_S), strict=True))
    records, families, shown = [], {}, set()
    for row in rows:
        record = {"step": step, **row.to_record()}
        heavy = Experience(row).reload({family: packs[where.ref] for family, where in row.packs.items()}).heavy
        if pixels := heavy.pop(MEDIA, None):
            families[MEDIA] = {}
            record[MEDIA] = [image_record(digest, pixels[digest]) for digest in sorted(pixels.keys() - shown)]
            shown |= pixels.keys()
        for family, payload in heavy.items():
            families.setdefault(family, {name: str(column.dtype) for name, column in payload.items()})
            record |= {column_name(family, name): column.tolist() for name, column in payload.items()}
        records.append(record)
    names = {name: None for record in records for name in record}  # from_pylist takes those of the first record alone
    table = pa.table({name: [record.get(name) for record in records] for name in names})
    table = table.replace_schema_metadata({METADATA: json.dumps({**notes, "step": step, "families": families})})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(Path(path))
    pq.write_table(table, draft)
    draft.replace(path)
    return len(records)


@ray.remote(num_cpus=0.1, max_retries=1)
def read_records(path: str) -> Iterator[tuple[dict[str, Any], list[Row]] | Pack]:
    """A stream: the notes and the light rows, whose packs have no reference yet; then a Pack for each of notes["families"], in that order."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    notes = json.loads(table.schema.metadata[METADATA])
    payloads: dict[str, list[Payload]] = {family: [] for family in notes["families"]}
    rows = []
    for record in table.to_pylist():
        row = Row.from_record(record)
        for family, payload in payloads_of(record, notes["families"]).items():
            row.packs[family] = PackRef(None, len(payloads[family]))
            payloads[family].append(payload)
        rows.append(row)
    yield notes, rows
    for family, own in payloads.items():
        yield Pack.of(family, own)


async def recorded(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The notes and rows of a file, the rows with references to packs that the caller owns."""
    stream = read_records.remote(str(path))
    async with asyncio.timeout(RECORD_S):
        notes, rows = await (await anext(stream))
        refs = {family: await anext(stream) for family in notes["families"]}
    for row in rows:
        for family, where in row.packs.items():
            where.ref = refs[family]
    return notes, rows


def payloads_of(record: dict[str, Any], families: dict[str, dict[str, str]]) -> dict[str, Payload]:
    """The heavy columns that a record has, by family. `families`: names and dtypes of the columns."""
    out = {}
    for family, dtypes in families.items():
        if family == MEDIA:
            if record[MEDIA] is not None:
                out[MEDIA] = {image["digest"]: pixels_of(image) for image in record[MEDIA]}
            continue
        columns = {name: record[column_name(family, name)] for name in dtypes}
        if None not in columns.values():
            out[family] = {name: np.array(columns[name], dtype) for name, dtype in dtypes.items()}
    return out


def image_record(digest: str, pixels: np.ndarray) -> dict[str, Any]:
    return {"digest": digest, "dtype": str(pixels.dtype), "shape": list(pixels.shape), "pixels": pixels.tobytes()}


def pixels_of(image: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(image["pixels"], image["dtype"]).reshape(image["shape"])


def column_name(family: str, name: str) -> str:
    return name if family == TOKENS else f"{family}.{name}"
