//! The kernels of `ptx/`, each loaded once. The driver compiles them for the installed GPU, which takes time on first use.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use cust::module::Module;
use cust::sys::CUfunction;
use std::collections::HashMap;

/// A PTX file embedded in this program.
pub(super) struct PtxFile {
    /// Name below `ptx/`.
    pub(super) name: &'static str,
    /// The file as compressed by build.rs, a twelfth of its text.
    pub(super) packed: &'static [u8],
}

/// The [`PtxFile`] with the given name below `ptx/`.
macro_rules! ptx_file {
    ($name:literal) => {
        $crate::device::cuda::modules::PtxFile { name: $name, packed: include_bytes!(concat!(env!("OUT_DIR"), "/ptx/", $name, ".zst")) }
    };
}
pub(super) use ptx_file;

/// A PTX file and the names of its kernels.
pub(super) struct PtxSource {
    pub(super) file: PtxFile,
    /// Kernels in three formats: `name_bf16`, `name_f16`, `name_f32`.
    pub(super) typed: &'static [&'static str],
    pub(super) plain: &'static [&'static str],
}

impl PtxFile {
    /// The text of the file.
    ///
    /// # Errors
    /// `Format` when the embedded file is damaged.
    pub(super) fn text(&self) -> Result<String> {
        let packed = |e: std::io::Error| Error::format(format!("ptx/{}", self.name), format_args!("in this program: {e}"));
        let bytes = zstd::decode_all(self.packed).map_err(packed)?;
        String::from_utf8(bytes).map_err(|e| packed(std::io::Error::other(e)))
    }
}

impl PtxSource {
    fn has(&self, name: &str) -> bool {
        self.typed.iter().chain(self.plain).any(|kernel| *kernel == name)
    }
}

/// Loaded kernels by name and format.
pub(super) struct Modules {
    functions: HashMap<(&'static str, Option<Dtype>), CUfunction>,
    /// Keeps the modules loaded, because functions are valid only as long as their modules.
    modules: Vec<Module>,
    /// Loaded when one of their kernels is first launched.
    later: &'static [&'static PtxSource],
}

impl Modules {
    /// Loads all of `sources`; a file of `later` is loaded when one of its kernels is first requested.
    pub(super) fn load(sources: impl Iterator<Item = &'static PtxSource>, later: &'static [&'static PtxSource]) -> Result<Self> {
        let mut modules = Self { functions: HashMap::new(), modules: Vec::new(), later };
        for source in sources {
            modules.add(source)?;
        }
        Ok(modules)
    }

    fn add(&mut self, source: &'static PtxSource) -> Result<()> {
        let module = Module::from_ptx(source.file.text()?, &[])
            .map_err(|e| Error::resource(format!("load ptx/{}", source.file.name), format!("CUDA error {}", e as u32)))?;
        for name in source.plain {
            self.functions.insert((*name, None), find(&module, source, name)?);
        }
        for (name, dtype) in source.typed.iter().flat_map(|name| FORMATS.map(|dtype| (*name, dtype))) {
            self.functions.insert((name, Some(dtype)), find(&module, source, &format!("{name}_{}", suffix(dtype)))?);
        }
        self.modules.push(module);
        Ok(())
    }

    /// The kernel `name`, in the variant for `dtype` if it has several.
    pub(super) fn get(&mut self, name: &'static str, dtype: Option<Dtype>) -> Result<CUfunction> {
        let unknown = || Error::Unsupported(format!("kernel {name} on {}", dtype.map_or("one format".into(), |d| d.to_string())));
        if let Some(function) = self.functions.get(&(name, dtype)) {
            return Ok(*function);
        }
        self.add(self.later.iter().find(|source| source.has(name)).ok_or_else(unknown)?)?;
        self.functions.get(&(name, dtype)).copied().ok_or_else(unknown)
    }
}

const FORMATS: [Dtype; 3] = [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32];

fn suffix(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bfloat16 => "bf16",
        Dtype::Float16 => "f16",
        Dtype::Float32 => "f32",
        Dtype::Int32 => "i32",
        Dtype::Uint16 => "u16",
        Dtype::Uint8 => "u8",
        Dtype::Float8E4m3 => "e4m3",
        Dtype::Float8E5m2 => "e5m2",
    }
}

fn find(module: &Module, source: &PtxSource, name: &str) -> Result<CUfunction> {
    let failed =
        |e: cust::error::CudaError| Error::resource(format!("find {name} in ptx/{}", source.file.name), format!("CUDA error {}", e as u32));
    module.get_function(name).map(|function| function.to_raw()).map_err(failed)
}
