"""Parquet files as Python writes them, of the conversations in ../trl, and two that expand without end.

    python generate.py        # datasets 5.2.0, pyarrow as it brings it

marks.parquet       as `datasets` writes it: Snappy, a list of structures
plain.parquet       Zstandard, pages of version 2, no dictionaries, several row groups
reasoning.parquet   not compressed, a page for every few values, null where a message lacks a key
labels.parquet      token ids and labels
weights.parquet     token ids and weights
nan.parquet         the same, one weight NaN
deltas_1.parquet    texts and numbers as differences, pages of version 1
deltas_2.parquet    the same, of version 2
binary.parquet      text without the mark that says so
no_rows.parquet     a column of text without rows
gzip.parquet        texts, compressed by gzip
brotli.parquet      the same, by brotli
lz4.parquet         the same, by LZ4
union.parquet       two conversations with tools: a structure has the keys of all rows
json_type.parquet   the same, their schemas of the type Json of `datasets`
rows_bomb.parquet   a text of 1 KiB, a million times in a dictionary
page_bomb.parquet   one text of 64 MiB, compressed
"""

import json
import pathlib

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent


def records(case):
    return [json.loads(line) for line in (HERE.parent / "trl" / f"{case}.jsonl").read_text().splitlines()]


def write_tools():
    def chat(name, schemas):
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}
        call = {"type": "function", "function": {"name": name, "arguments": {key: "x" for key in schemas}}}
        answers = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "yes"}]
        return {"messages": [{"role": "user", "content": "question"}, *answers], "tools": [tool]}

    chats = [chat("f", {"city": {"type": "string"}}), chat("g", {"day": {"type": "integer"}})]
    pq.write_table(pa.Table.from_pylist(chats), HERE / "union.parquet")
    text, json_type = datasets.Value("string"), datasets.Json()
    function = {"name": text, "arguments": json_type}
    message = {"role": text, "content": text, "tool_calls": datasets.List({"type": text, "function": function})}
    tool = {"type": text, "function": {"name": text, "parameters": {"type": text, "properties": json_type}}}
    features = datasets.Features({"messages": datasets.List(message), "tools": datasets.List(tool)})
    datasets.Dataset.from_list(chats, features=features).to_parquet(HERE / "json_type.parquet")


def main():
    datasets.Dataset.from_list(records("marks")).to_parquet(HERE / "marks.parquet")
    plain = pa.Table.from_pylist(records("plain"))
    pq.write_table(plain, HERE / "plain.parquet", compression="zstd", data_page_version="2.0", use_dictionary=False, row_group_size=5)
    reasoning = pa.Table.from_pylist(records("reasoning"))
    pq.write_table(reasoning, HERE / "reasoning.parquet", compression="none", data_page_size=64, write_batch_size=2)
    labels = [{"id": n, "input_ids": [n, n + 1, 7], "labels": [-100, n + 1, 7]} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(labels), HERE / "labels.parquet")
    weights = [{"input_ids": [n, n + 1, 7], "weights": [1.0, n / 64, 0.25]} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(weights), HERE / "weights.parquet")
    weights[1]["weights"][1] = float("nan")
    pq.write_table(pa.Table.from_pylist(weights), HERE / "nan.parquet")
    encodings = {"id": "DELTA_BINARY_PACKED", "text": "DELTA_LENGTH_BYTE_ARRAY", "path": "DELTA_BYTE_ARRAY"}
    deltas = [{"id": n * n, "text": None if n % 7 == 0 else "é" * (n % 5), "path": f"shared/beginning/{n}"} for n in range(400)]
    for version in "12":
        to = HERE / f"deltas_{version}.parquet"
        table = pa.Table.from_pylist(deltas)
        pq.write_table(table, to, data_page_version=f"{version}.0", use_dictionary=False, column_encoding=encodings, data_page_size=2048)
    binary = pa.table({"text": pa.array([f"text {n} é".encode() for n in range(40)], pa.binary()), "image": pa.array([b"\xff\xd8"] * 40)})
    pq.write_table(binary, HERE / "binary.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), HERE / "no_rows.parquet")
    for compression in ["gzip", "brotli", "lz4"]:
        texts = pa.table({"text": [f"text {n}" for n in range(40)]})
        pq.write_table(texts, HERE / f"{compression}.parquet", compression=compression)
    write_tools()
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), ["x" * 1024])
    pq.write_table(pa.table({"text": texts}), HERE / "rows_bomb.parquet", compression="zstd", store_schema=False, write_statistics=False)
    page = pa.table({"text": ["x" * (64 << 20)]})
    pq.write_table(page, HERE / "page_bomb.parquet", compression="zstd", compression_level=19, use_dictionary=False, write_statistics=False)


if __name__ == "__main__":
    main()
