use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::fs;
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The records of a file, of its columns all but `image`.
fn records(path: &Path) -> Result<Vec<Value>> {
    let mut records = Vec::new();
    ParquetRows::open(path)?.for_each(|column| column != "image", &mut |number, record, offset| {
        records.push(serde_json::from_str(record).unwrap());
        assert_eq!(number, records.len() as u64);
        assert!(offset <= fs::metadata(path).unwrap().len());
        Ok(true)
    })?;
    Ok(records)
}

/// The error of a file that holds `bytes`.
fn refused(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    let message = records(file.path()).unwrap_err().to_string();
    assert!(!message.contains('\n') && message.starts_with(file.path().to_str().unwrap()), "{message}");
    message
}

/// Without keys that are null, as tables have them.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            map.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), without_nulls(value))).collect()
        }
        Value::Array(list) => list.iter().map(without_nulls).collect(),
        other => other.clone(),
    }
}

#[test]
fn rows_are_the_lines_that_they_were_made_of() {
    for case in ["marks", "plain", "reasoning"] {
        let lines = fs::read_to_string(golden("trl").join(case).with_extension("jsonl")).unwrap();
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let rows: Vec<_> = records(&golden("parquet").join(case).with_extension("parquet")).unwrap().iter().map(without_nulls).collect();
        assert_eq!(rows, lines, "{case}");
    }
    let labels = records(&golden("parquet/labels.parquet")).unwrap();
    assert_eq!(labels[3], json!({"id": 3, "input_ids": [3, 4, 7], "labels": [-100, 4, 7]}));
    let binary = records(&golden("parquet/binary.parquet")).unwrap();
    assert_eq!((binary.len(), &binary[39]), (40, &json!({"text": "text 39 é"})));
}

#[test]
fn a_structure_has_the_keys_of_its_own_row_and_json_columns_their_values() {
    let tool = |name: &str, properties: Value| json!([{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}]);
    let tools = [tool("f", json!({"city": {"type": "string"}})), tool("g", json!({"day": {"type": "integer"}}))];
    let arguments = [json!({"city": "x"}), json!({"day": "x"})];
    for case in ["union", "json_type"] {
        let rows = records(&golden("parquet").join(case).with_extension("parquet")).unwrap();
        for (row, (tools, arguments)) in rows.iter().zip(tools.iter().zip(&arguments)) {
            assert_eq!(&row["tools"], tools, "{case}");
            let call = &row["messages"][1];
            assert_eq!((&call["tool_calls"][0]["function"]["arguments"], call.get("content")), (arguments, None), "{case}");
        }
        assert_eq!(rows.len(), 2);
    }
}

#[test]
fn gzip_is_read_and_another_compression_is_refused_with_the_command_that_converts_it() {
    let rows = records(&golden("parquet/gzip.parquet")).unwrap();
    assert_eq!((rows.len(), &rows[39]), (40, &json!({"text": "text 39"})));
    for (case, name) in [("brotli", "BROTLI"), ("lz4", "LZ4_RAW")] {
        let path = golden("parquet").join(case).with_extension("parquet");
        let refused = records(&path).unwrap_err().to_string();
        let output = format!("row group 0: column text: compressed by {name}: Snappy, gzip, Zstandard and no compression are read");
        assert!(refused.contains(&output) && refused.ends_with(&format!("'{}', compression='zstd')\"", path.display())), "{refused}");
    }
}

#[test]
fn the_first_row_names_a_column_of_media_that_is_not_read() {
    let rows = records(&golden("parquet/binary.parquet")).unwrap();
    assert_eq!((&rows[0], &rows[1]), (&json!({"text": "text 0 é", "image": true}), &json!({"text": "text 1 é"})));
}

#[test]
fn differences_are_read_and_a_count_beyond_its_page_is_refused() {
    let text = |n: u64| if n.is_multiple_of(7) { Value::Null } else { "é".repeat(n as usize % 5).into() };
    let row = |n: u64| json!({"id": n * n, "text": text(n), "path": format!("shared/beginning/{n}")});
    let rows: Vec<Value> = (0..400).map(row).collect();
    for version in [1, 2] {
        assert_eq!(records(&golden("parquet").join(format!("deltas_{version}.parquet"))).unwrap(), rows, "version {version}");
    }
    let forged = fs::read(golden("../../fuzz/corpus/parquet/delta_count.parquet")).unwrap();
    assert!(refused(&forged).contains("a page's counts do not fit to its bytes"), "{}", refused(&forged));
}

#[test]
fn reading_ends_with_its_consumer_and_no_column_means_all_columns() {
    let rows = ParquetRows::open(&golden("parquet/binary.parquet")).unwrap();
    let (mut count, mut seen) = (0, Vec::new());
    let two = &mut |_, _: &str, _| {
        count += 1;
        Ok(count < 2)
    };
    rows.for_each(|_| false, &mut |_, record, _| {
        seen.push(record.to_string());
        Ok(true)
    })
    .unwrap();
    rows.for_each(|column| column == "text", two).unwrap();
    assert_eq!((count, seen), (2, vec!["{\"text\":null,\"image\":null}".to_string()]));
    let wrong = rows.for_each(|_| true, &mut |_, _, _| Ok(true)).unwrap_err().to_string();
    assert!(wrong.ends_with("binary.parquet: row group 0: row 1: column image: bytes that are not UTF-8"), "{wrong}");
}

#[test]
fn unbounded_decompression_is_refused() {
    let rows = records(&golden("parquet/rows_bomb.parquet")).unwrap_err().to_string();
    assert!(rows.contains("rows_bomb.parquet: row group 0: the file expands to more than 16777216 bytes, 200 times its size"), "{rows}");
    let page = records(&golden("parquet/page_bomb.parquet")).unwrap_err().to_string();
    assert!(page.contains("page_bomb.parquet: row group 0: column text: the page at byte 4 would take 67108"), "{page}");
    assert!(page.ends_with(": at most 16777216 are read"), "{page}");
}

#[test]
fn non_parquet_files_are_refused() {
    let good = fs::read(golden("parquet/plain.parquet")).unwrap();
    assert!(refused(b"").ends_with("not a parquet file: too short"));
    assert!(refused(b"{\"text\": \"a line\"}").contains("it does not end with PAR1"));
    assert!(refused(&good[..good.len() - 1]).contains("it does not end with PAR1"));
    assert!(refused(b"PAR1\xff\xff\xff\x7fPAR1").contains("its footer is longer than the file"));
    assert!(refused(b"PAR1\0\0\0\0\x04\0\0\0PAR1").contains("its footer cannot be read"));
    // A schema of columns in columns in columns.
    let schema = [&[0x29, 0xfc, 0xe8, 0x07][..], &[0x55, 0x02, 0x00].repeat(1000), &[0x00]].concat();
    let footer = [b"PAR1", &schema[..], &(schema.len() as u32).to_le_bytes(), b"PAR1"].concat();
    assert!(refused(&footer).contains("nested too deeply"), "{}", refused(&footer));
    // The pages are gone, and the footer speaks of them.
    let footer_bytes = u32::from_le_bytes(good[good.len() - 8..][..4].try_into().unwrap()) as usize;
    let cut = [&b"PAR1"[..], &good[good.len() - 8 - footer_bytes..]].concat();
    assert!(refused(&cut).contains("row group 0: column "), "{}", refused(&cut));
}

proptest! {
    /// Damage is an error or other records, and neither a panic nor a wait.
    #[test]
    fn damaged_files_are_read_or_refused(case in 0..4usize, damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let name = ["marks", "plain", "reasoning", "labels"][case];
        let mut bytes = fs::read(golden("parquet").join(name).with_extension("parquet")).unwrap();
        for (at, byte) in damages {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let _ = records(file.path());
    }
}

/// The library would look at two billion elements, of which none takes a byte.
#[test]
fn a_list_that_takes_no_bytes_is_refused() {
    let file = fs::read(golden("parquet/plain.parquet")).unwrap();
    let (rest, end) = file.split_at(file.len() - 8);
    let (data, footer) = rest.split_at(rest.len() - u32::from_le_bytes(end[..4].try_into().unwrap()) as usize);
    let with_field = |field: &[u8]| {
        let footer = [&footer[..footer.len() - 1], field, &[0]].concat();
        [data, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
    };
    // Field 100, which nobody knows: a list of bools, and a number.
    let message = refused(&with_field(&[9, 200, 1, 0xf1, 255, 255, 255, 255, 7]));
    assert!(message.ends_with(": its footer cannot be read"), "{message}");
    let known = tempfile::NamedTempFile::new().unwrap();
    fs::write(known.path(), with_field(&[6, 200, 1, 150, 1])).unwrap();
    assert_eq!(records(known.path()).unwrap(), records(&golden("parquet/plain.parquet")).unwrap());
}
