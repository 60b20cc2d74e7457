//! The kernels of `ptx/`, loaded once; the driver compiles them for the GPU it finds.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use cust::module::Module;
use cust::sys::CUfunction;
use std::collections::HashMap;

/// One PTX file and what it exports.
pub(super) struct PtxSource {
    /// Its name below `ptx/`.
    pub(super) file: &'static str,
    pub(super) ptx: &'static str,
    /// Kernels in three formats: `name_bf16`, `name_f16`, `name_f32`.
    pub(super) typed: &'static [&'static str],
    pub(super) plain: &'static [&'static str],
}

/// All loaded kernels by name and format.
pub(super) struct Modules {
    functions: HashMap<(&'static str, Option<Dtype>), CUfunction>,
    /// Functions live as long as their modules.
    _modules: Vec<Module>,
}

impl Modules {
    pub(super) fn load(sources: impl Iterator<Item = &'static PtxSource>) -> Result<Self> {
        let mut functions = HashMap::new();
        let mut modules = Vec::new();
        for source in sources {
            let module = Module::from_ptx(source.ptx, &[])
                .map_err(|e| Error::resource(format!("load ptx/{}", source.file), format!("CUDA error {}", e as u32)))?;
            for name in source.plain {
                functions.insert((*name, None), find(&module, source, name)?);
            }
            for (name, dtype) in source.typed.iter().flat_map(|name| FORMATS.map(|dtype| (*name, dtype))) {
                functions.insert((name, Some(dtype)), find(&module, source, &format!("{name}_{}", suffix(dtype)))?);
            }
            modules.push(module);
        }
        Ok(Self { functions, _modules: modules })
    }

    /// The kernel `name`, in the form for `dtype` if it has several.
    pub(super) fn get(&self, name: &'static str, dtype: Option<Dtype>) -> Result<CUfunction> {
        let unknown = || Error::Unsupported(format!("kernel {name} on {}", dtype.map_or("one format".into(), |d| d.to_string())));
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
    }
}

fn find(module: &Module, source: &PtxSource, name: &str) -> Result<CUfunction> {
    let failed =
        |e: cust::error::CudaError| Error::resource(format!("find {name} in ptx/{}", source.file), format!("CUDA error {}", e as u32));
    module.get_function(name).map(|function| function.to_raw()).map_err(failed)
}
