//! The tensors of an export: their order, their formats, their files.

use super::export_config::pretty;
use super::read_ahead;
use crate::disk::{Dir, OutFile};
use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use crate::model::correction;
use crate::model::tensors::{HfPart, TensorSpec, TensorTable};
use crate::model::weights::carried::{CarriedTensors, SourceTensor};
use crate::model::weights::position;
use crate::model::weights::safetensors::METADATA;
use crate::model_dir::{INDEX, SINGLE};
use ::safetensors::tensor::Dtype as FileDtype;
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Elements narrowed and written at once; few in tests, so that small tensors have many blocks.
const WRITE_ELEMS: usize = if cfg!(test) { 100 } else { 1 << 18 };

/// From so many bytes on, the disk begins to write, while the next tensors are read.
const WRITE_BACK_BYTES: u64 = 32 << 20;

/// A tensor to write.
pub(super) struct Item<'a> {
    name: String,
    dtype: FileDtype,
    shape: Vec<usize>,
    content: Content<'a>,
}

enum Content<'a> {
    /// A part of a tensor of the table.
    Trained(&'a TensorSpec, HfPart),
    /// The bytes of the source.
    Carried(&'a CarriedTensors),
    /// The bytes of the source but for some rows, which are a tensor of the table.
    CarriedButRows(&'a CarriedTensors, &'a TensorSpec),
}

impl Content<'_> {
    /// The tensor of the table whose values are written.
    fn spec(&self) -> Option<&TensorSpec> {
        match self {
            Self::Trained(spec, _) | Self::CarriedButRows(_, spec) => Some(spec),
            Self::Carried(_) => None,
        }
    }

    /// Sets `tensor` to the values of the tensor of the table, if there is one.
    fn read(&self, read: &mut impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>, tensor: &mut Vec<f32>) -> Result<()> {
        self.spec().map_or(Ok(()), |spec| {
            tensor.resize(spec.elems(), 0.0);
            read(spec, tensor)
        })
    }
}

impl Item<'_> {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Appends the bytes of this item. `tensor` has the values of its tensor of the table.
    fn write(&self, file: &mut OutFile, tensor: &[f32]) -> Result<()> {
        match &self.content {
            Content::Carried(carried) => carried.read(&self.name, |bytes| file.write(bytes)),
            Content::CarriedButRows(carried, spec) => {
                let (rows, mut at) = (rows_in_file(spec, tensor, self.dtype), 0);
                carried.read(&self.name, |bytes| {
                    let written = with_rows(bytes, at, &rows);
                    at += bytes.len();
                    file.write(&written)
                })
            }
            Content::Trained(spec, part) => write_part(file, (spec, part), tensor, self.dtype),
        }
    }
}

/// All tensors of `table` in forward order, in format `dtype`. Parts of one of ours are neighbours, so that it is read once.
pub(super) fn of_table(table: &TensorTable, dtype: Dtype) -> Vec<Item<'_>> {
    let item = |spec, part: HfPart| Item {
        name: part.name.clone(),
        dtype: trained_dtype(&part, Some(dtype), FileDtype::F32),
        shape: TensorSpec::part_shape(spec, &part),
        content: Content::Trained(spec, part),
    };
    table.specs().iter().rev().flat_map(|spec| spec.parts().map(move |part| item(spec, part))).collect()
}

/// All tensors of the source in its order: those of `table` in format `dtype`, or in their own, and the carried ones as they were.
///
/// # Errors
/// `Format` for a source that is not that of the table.
pub(super) fn of_source<'a>(carried: &'a CarriedTensors, table: &'a TensorTable, dtype: Option<Dtype>) -> Result<Vec<Item<'a>>> {
    let parts = table.specs().iter().flat_map(|spec| spec.parts().map(move |part| (part.name.clone(), (spec, part))));
    let (parts, mut names) = (parts.collect::<HashMap<_, _>>(), HashSet::new());
    let wrong = |name: &str| Error::format(carried.path(), format_args!("lists {name:?}, which does not fit the model"));
    let item = |SourceTensor { name, dtype: own, shape, trained, trained_rows }: &SourceTensor| {
        let part = trained.as_ref().or(trained_rows.as_ref()).map(|part| parts.get(part).ok_or_else(|| wrong(name))).transpose()?;
        let (content, dtype) = match part {
            None => (Content::Carried(carried), *own),
            Some((spec, part)) => {
                let part = spec.oriented(part.clone(), shape);
                names.insert(part.name.clone());
                let is_read = [FileDtype::F32, FileDtype::BF16, FileDtype::F16].contains(own);
                if spec.part_shape(&part) != *shape || !is_read || part.file_rows.is_some() == trained.is_some() {
                    return Err(wrong(name));
                }
                match part.file_rows {
                    Some(_) => (Content::CarriedButRows(carried, spec), *own),
                    None => (Content::Trained(spec, part.clone()), trained_dtype(&part, dtype, *own)),
                }
            }
        };
        Ok(Item { name: name.clone(), dtype, shape: shape.clone(), content })
    };
    let items: Vec<Item> = carried.source().iter().map(item).collect::<Result<_>>()?;
    match parts.keys().find(|name| !names.contains(*name)) {
        None => Ok(items),
        Some(name) => Err(Error::format(carried.path(), format_args!("lists no {name:?}, which the model has"))),
    }
}

/// The format of a trained part whose source has the format `own`. A correction keeps all of its bits.
fn trained_dtype(part: &HfPart, dtype: Option<Dtype>, own: FileDtype) -> FileDtype {
    dtype.filter(|_| !part.split).map_or(own, file_dtype)
}

fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::Bfloat16 => FileDtype::BF16,
        Dtype::Float16 => FileDtype::F16,
        _ => FileDtype::F32,
    }
}

/// `items` in their order, divided into shards of at most so many bytes, or of one tensor.
fn shards(items: Vec<Item<'_>>, max_shard_bytes: u64) -> Vec<Vec<Item<'_>>> {
    let mut shards: Vec<Vec<Item>> = vec![];
    let mut shard_bytes = 0;
    for item in items {
        let bytes = item.bytes() as u64;
        match shards.last_mut() {
            Some(shard) if shard_bytes + bytes <= max_shard_bytes => shard.push(item),
            _ => {
                shards.push(vec![item]);
                shard_bytes = 0;
            }
        }
        shard_bytes += bytes;
    }
    shards
}

/// Writes `items` into `dir`, in shards of at most so many bytes. `read` gives the values of a tensor of the table. It runs on a thread of
/// its own, which reads a tensor while the one before is written, so that the values of two tensors are in memory.
///
/// # Errors
/// The first error in the order of `items`, of `read` or of a file; `Resource` when no thread can be started.
pub(super) fn write(
    dir: &Dir,
    items: Vec<Item<'_>>,
    max_shard_bytes: u64,
    read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()> + Send,
) -> Result<()> {
    let shards = shards(items, max_shard_bytes);
    let items = |(nth, shard)| std::iter::repeat(nth).zip(shard);
    let items: Vec<(usize, &Item)> = shards.iter().enumerate().flat_map(items).collect();
    let index = |item: &Item| item.content.spec().map(|spec| spec.index);
    let runs: Vec<_> = items.chunk_by(|(_, item), (_, next)| index(item) == index(next)).collect();
    let hold = |read: &mut _, nth: usize, tensor: &mut Vec<f32>| runs[nth][0].1.content.read(read, tensor);
    let mut files = ShardFiles::new(dir, &shards);
    read_ahead::in_order(vec![read], runs.len(), hold, |nth, tensor| {
        runs[nth].iter().try_for_each(|&(shard, item)| files.write(shard, item, tensor))
    })?;
    files.end()
}

/// The files of all shards, of which one is open.
struct ShardFiles<'a> {
    dir: &'a Dir,
    shards: &'a [Vec<Item<'a>>],
    /// The position of the shard that is being written, the name of its file, and the file.
    open: Option<(usize, String, OutFile)>,
    weight_map: Map<String, Value>,
    total_bytes: usize,
}

impl<'a> ShardFiles<'a> {
    fn new(dir: &'a Dir, shards: &'a [Vec<Item<'a>>]) -> Self {
        Self { dir, shards, open: None, weight_map: Map::new(), total_bytes: 0 }
    }

    /// Appends `item` to shard `nth`. `tensor` has the values of the item's tensor of the table.
    fn write(&mut self, nth: usize, item: &Item, tensor: &[f32]) -> Result<()> {
        let open = match self.open.take_if(|(open, ..)| *open == nth) {
            Some(open) => open,
            None => self.begin(nth)?,
        };
        let (_, name, file) = self.open.insert(open);
        item.write(file, tensor)?;
        file.begin_writing_back(WRITE_BACK_BYTES);
        self.weight_map.insert(item.name.clone(), Value::from(name.as_str()));
        self.total_bytes += item.bytes();
        Ok(())
    }

    /// Ends the open shard, and creates shard `nth` with its header.
    fn begin(&mut self, nth: usize) -> Result<(usize, String, OutFile)> {
        self.sync()?;
        let all = self.shards.len();
        let name = if all == 1 { SINGLE.into() } else { format!("model-{:05}-of-{all:05}.safetensors", nth + 1) };
        let mut file = self.dir.create_file(&name)?;
        file.write(&header(&self.shards[nth]))?;
        Ok((nth, name, file))
    }

    fn sync(&self) -> Result<()> {
        self.open.as_ref().map_or(Ok(()), |(.., file)| file.sync())
    }

    /// Ends the open shard, and writes the index of several shards.
    fn end(self) -> Result<()> {
        self.sync()?;
        let index = json!({"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map});
        if self.shards.len() > 1 { self.dir.write_file(INDEX, &pretty(&index)).map(drop) } else { Ok(()) }
    }
}

/// The length, then the JSON, padded so that the tensors are aligned.
fn header(shard: &[Item<'_>]) -> Vec<u8> {
    let (mut map, mut start) = (Map::new(), 0);
    map.insert(METADATA.into(), json!({"format": "pt"}));
    for item in shard {
        let end = start + item.bytes();
        map.insert(item.name.clone(), json!({"dtype": item.dtype, "shape": item.shape, "data_offsets": [start, end]}));
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The bytes of trained rows in a file of this format, and their first byte in the table.
fn rows_in_file(spec: &TensorSpec, rows: &[f32], dtype: FileDtype) -> (usize, Vec<u8>) {
    let first = spec.first_token().unwrap_or(0) * spec.row_elems() * dtype.bitsize() / 8;
    let bytes = match dtype {
        FileDtype::BF16 => narrowed::<bf16>(rows),
        FileDtype::F16 => narrowed::<f16>(rows),
        _ => narrowed::<f32>(rows),
    };
    (first, bytes)
}

fn narrowed<E: Element>(values: &[f32]) -> Vec<u8> {
    let values: Vec<E> = values.iter().map(|&value| E::from_f32(value)).collect();
    bytemuck::cast_slice(&values).to_vec()
}

/// The `bytes` of a table from byte `at` on, with the trained `rows` in their place.
fn with_rows<'a>(bytes: &'a [u8], at: usize, (first, rows): &(usize, Vec<u8>)) -> Cow<'a, [u8]> {
    let (start, end) = (at.max(*first), (at + bytes.len()).min(first + rows.len()));
    if start >= end {
        return Cow::Borrowed(bytes);
    }
    let mut changed = bytes.to_vec();
    changed[start - at..end - at].copy_from_slice(&rows[start - first..end - first]);
    Cow::Owned(changed)
}

fn write_part(file: &mut OutFile, part: (&TensorSpec, &HfPart), tensor: &[f32], dtype: FileDtype) -> Result<()> {
    match dtype {
        FileDtype::BF16 => write_blocks::<bf16>(file, part, tensor),
        FileDtype::F16 => write_blocks::<f16>(file, part, tensor),
        _ => write_blocks::<f32>(file, part, tensor),
    }
}

fn write_blocks<E: Element>(file: &mut OutFile, (spec, part): (&TensorSpec, &HfPart), tensor: &[f32]) -> Result<()> {
    let (elems, mut block) = (part.rows * spec.row_elems(), Vec::with_capacity(WRITE_ELEMS));
    for start in (0..elems).step_by(WRITE_ELEMS) {
        let range = start..elems.min(start + WRITE_ELEMS);
        block.clear();
        if part.split {
            block.extend(range.map(|i| E::from_f32(correction::join(tensor, i))));
        } else if part.transposed {
            block.extend(range.map(|i| E::from_f32(tensor[position(spec, part, i)])));
        } else {
            runs(range, spec.row_elems()).for_each(|run| {
                let first = position(spec, part, run.start);
                block.extend(tensor[first..first + run.len()].iter().map(|&value| E::from_f32(value)));
            });
        }
        file.write(bytemuck::cast_slice(&block))?;
    }
    Ok(())
}

/// `range` in runs within one row of `cols` elements, which are neighbours in the tensor as well.
fn runs(range: Range<usize>, cols: usize) -> impl Iterator<Item = Range<usize>> {
    let run = move |start: usize| (start < range.end).then(|| start..range.end.min((start / cols + 1) * cols));
    std::iter::successors(run(range.start), move |before| run(before.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_with_their_row_or_the_range() {
        assert_eq!(runs(95..205, 40).collect::<Vec<_>>(), [95..120, 120..160, 160..200, 200..205]);
        assert_eq!(runs(80..121, 40).collect::<Vec<_>>(), [80..120, 120..121]);
        assert_eq!(runs(7..7, 40).count(), 0);
    }
}
