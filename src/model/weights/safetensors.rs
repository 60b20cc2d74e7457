//! One safetensors file: validation of its header, and reads at offsets.

use crate::disk::InFile;
use crate::error::{Error, Result};
use ::safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Limit of the format.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Key of free text in the header.
pub(crate) const METADATA: &str = "__metadata__";

/// An open file with tensors that lie inside it and do not overlap.
pub(super) struct TensorFile {
    file: InFile,
    data_start: u64,
    tensors: HashMap<String, TensorInfo>,
}

impl TensorFile {
    /// Opens `path` and checks its header: tensors cover the file without gaps or overlaps, and the size of each agrees with its shape.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = InFile::open(path)?;
        let mut length = [0; 8];
        if file.bytes() < 8 {
            return Err(Error::format(path, format_args!("{} bytes are too few for a safetensors file", file.bytes())));
        }
        file.read_at(0, &mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > HEADER_BYTES_MAX.min(file.bytes() - 8) {
            return Err(Error::format(path, format_args!("a header of {header_bytes} bytes does not fit the file")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_at(8, &mut header)?;
        let UniqueMap(tensors) = serde_json::from_slice(&header).map_err(|e| Error::format(path, format_args!("header: {e}")))?;
        let data_start = 8 + header_bytes;
        check_layout(&tensors, file.bytes() - data_start).map_err(|cause| Error::format(path, cause))?;
        Ok(Self { file, data_start, tensors: tensors.into_iter().collect() })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Fills `out` from byte `start` of a tensor.
    pub(super) fn read(&self, info: &TensorInfo, start: usize, out: &mut [u8]) -> Result<()> {
        self.file.read_at(self.data_start + (info.data_offsets.0 + start) as u64, out)
    }
}

fn check_layout(tensors: &[(String, TensorInfo)], data_bytes: u64) -> std::result::Result<(), String> {
    let mut by_offset: Vec<_> = tensors.iter().collect();
    by_offset.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in by_offset {
        let (start, stop) = info.data_offsets;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &dim| bits.checked_mul(dim));
        let bytes = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        if start != end || bytes.is_none() || start.checked_add(bytes.unwrap_or(0)) != Some(stop) {
            let (shape, dtype) = (&info.shape, info.dtype);
            return Err(format!("tensor {name:?}: {dtype} {shape:?} at bytes {start}..{stop}, after byte {end}, does not add up"));
        }
        end = stop;
    }
    if end as u64 != data_bytes {
        return Err(format!("holds {data_bytes} bytes of tensors, its header describes {end}"));
    }
    Ok(())
}

/// A JSON object without duplicate keys; `__metadata__` is skipped.
pub(super) struct UniqueMap<V>(pub(super) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensor names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut entries, mut seen) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("tensor {name:?} comes twice")));
            }
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
            } else {
                entries.push((name, map.next_value()?));
            }
        }
        Ok(UniqueMap(entries))
    }
}
