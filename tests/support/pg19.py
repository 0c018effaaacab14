"""Parquet files like those of the hub's PG-19."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def parquet_of(columns: dict[str, list], **options) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)
    return buffer.getvalue()


def write_pg19(path: Path, texts: list[str], **options) -> Path:
    """Write a parquet file like the hub's PG-19, whose text is a column among others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"short_book_title": [f"Book {i}" for i in range(len(texts))], "text": texts}
    path.write_bytes(parquet_of(columns, **options))
    return path
