//! Opens NVIDIA's libraries at run time. The build needs none of them. A missing library is an error with its name, the searched folders
//! and the package to install.
//!
//! A library is opened by its absolute path, with global symbols, so that libraries which it opens by name (cuDNN opens NVRTC) are found
//! among the open ones.

use crate::error::{Error, Result};
use std::ffi::{CStr, CString, OsStr, c_void};
use std::fs;
use std::path::{Path, PathBuf};

/// A library for one release of CUDA: its name, and its Python package.
pub(super) struct Build {
    cuda: u32,
    soname: &'static str,
    package: &'static str,
}

/// A library's builds, best first.
pub(super) type Builds = [Build; 2];

pub(super) const CUBLASLT: Builds = [
    Build { cuda: 13, soname: "libcublasLt.so.13", package: "nvidia-cublas==13.*" },
    Build { cuda: 12, soname: "libcublasLt.so.12", package: "nvidia-cublas-cu12==12.*" },
];
pub(super) const NVRTC: Builds = [
    Build { cuda: 13, soname: "libnvrtc.so.13", package: "nvidia-cuda-nvrtc==13.*" },
    Build { cuda: 12, soname: "libnvrtc.so.12", package: "nvidia-cuda-nvrtc-cu12==12.*" },
];
pub(super) const CUDNN: Builds = [
    Build { cuda: 13, soname: "libcudnn.so.9", package: "nvidia-cudnn-cu13==9.*" },
    Build { cuda: 12, soname: "libcudnn.so.9", package: "nvidia-cudnn-cu12==9.*" },
];

pub(super) const NCCL: Builds = [
    Build { cuda: 13, soname: "libnccl.so.2", package: "nvidia-nccl-cu13" },
    Build { cuda: 12, soname: "libnccl.so.2", package: "nvidia-nccl-cu12" },
];

/// A library that cuDNN opens by name from its own folder.
const CUDNN_GRAPH: &str = "libcudnn_graph.so.9";

/// A library that NVRTC opens by a name with its own minor version.
const NVRTC_BUILTINS: &str = "libnvrtc-builtins.so.*";

/// Folders of NVIDIA's libraries in Python packages, below a Python prefix.
const WHEELS: [&str; 2] = ["lib/python3*/site-packages/nvidia/*/lib", "lib/python3*/dist-packages/nvidia/*/lib"];

/// Further prefixes that may contain a Python, and the folders of the CUDA toolkit, below the root of the file system.
const PREFIXES: [&str; 3] = ["usr/local", "opt/*", "opt/*/.venv"];
const TOOLKIT: [&str; 2] = ["usr/local/cuda/lib64", "usr/local/cuda/targets/*/lib"];

/// Search folders in order, and the newest CUDA release that the driver supports.
pub(super) struct Libraries {
    folders: Vec<PathBuf>,
    cuda: u32,
}

/// An open library. It is never closed, because its threads and exit handlers may outlive any owner.
pub(super) struct Library {
    handle: *mut c_void,
    /// Path, or the bare name when the system's loader found the library.
    pub(super) path: PathBuf,
}

impl Libraries {
    /// Collects the search folders: first the folders `named` by the user, then the environment in which this program is installed, active
    /// or not, the Python in use, other Pythons and the CUDA toolkit. Only reads directories and runs no program. `cuda` is the newest
    /// release that the driver supports.
    pub(super) fn new(named: &[PathBuf], cuda: u32) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let python = std::env::split_paths(&path).find(|folder| folder.join("python3").is_file());
        let own = std::env::current_exe().ok();
        let prefix_of = |program: Option<&Path>| program.and_then(Path::parent).map(Path::to_path_buf);
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        // Prefix of `pip install --user`.
        let personal = std::env::home_dir().map(|dir| dir.join(".local"));
        let own = prefix_of(own.as_deref().and_then(Path::parent));
        let pythons = [own, prefix_of(python.as_deref()), variable("VIRTUAL_ENV"), variable("CONDA_PREFIX"), personal];
        Self::below(Path::new("/"), named, &pythons.into_iter().flatten().collect::<Vec<_>>(), cuda)
    }

    fn below(root: &Path, named: &[PathBuf], pythons: &[PathBuf], cuda: u32) -> Self {
        let mut folders = named.to_vec();
        let others = PREFIXES.iter().flat_map(|prefix| matching(root, prefix));
        let prefixes = pythons.iter().cloned().chain(others);
        let found = prefixes.flat_map(|prefix| WHEELS.map(|wheels| matching(&prefix, wheels)).concat());
        for folder in found.chain(TOOLKIT.iter().flat_map(|toolkit| matching(root, toolkit))) {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        Self { folders, cuda }
    }

    /// Opens the first library that the driver supports.
    ///
    /// # Errors
    /// `Resource` with the library's name, all searched places and the package.
    pub(super) fn open(&self, builds: &Builds) -> Result<Library> {
        let mut refusals = Vec::new();
        let mut sonames: Vec<_> = builds.iter().filter(|build| build.cuda <= self.cuda).map(|build| build.soname).collect();
        sonames.dedup();
        let in_folder = |folder: &PathBuf| sonames.iter().map(|soname| folder.join(soname)).collect::<Vec<_>>();
        let paths = self.folders.iter().flat_map(in_folder).filter(|path| path.is_file());
        for path in paths.chain(sonames.iter().map(PathBuf::from)) {
            match open(&path) {
                Ok(library) => return self.served(library, builds),
                Err(why) => refusals.push(why),
            }
        }
        Err(self.missing(builds, &refusals))
    }

    /// Returns the library, unless it is a cuDNN built for a newer CUDA than the driver supports, which its file name does not show. NCCL
    /// reports such a mismatch itself. No further build is tried, because parts of this one are already open under the same names.
    fn served(&self, library: Library, builds: &Builds) -> Result<Library> {
        let [Build { soname, .. }, Build { package, .. }] = builds;
        let cuda = if *soname == CUDNN[0].soname { cuda_of_cudnn(&library.path)? } else { self.cuda };
        if cuda <= self.cuda {
            return Ok(library);
        }
        let built = format!("{} is built for CUDA {cuda}, but the driver supports CUDA {}", library.path.display(), self.cuda);
        let remedy = format!("run `pip install '{package}'` instead, or name another library's folder with --cuda-libraries");
        Err(Error::resource(format!("open {soname}"), format!("{built}; {remedy}")))
    }

    fn missing(&self, builds: &Builds, refusals: &[String]) -> Error {
        let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
        let [newest, oldest] = builds;
        let Build { soname, package, .. } = if newest.cuda <= self.cuda { newest } else { oldest };
        let cause = format!(
            "not in [{}]; the loader's error: {}; install it with `pip install '{package}'` or name its folder with --cuda-libraries",
            folders.join(", "),
            refusals.join("; "),
        );
        Error::resource(format!("open {soname}"), cause)
    }

    /// The libraries that a run needs: name, and path or error.
    pub(super) fn all(&self) -> Vec<(&'static str, Result<PathBuf>)> {
        [("cuBLASLt", &CUBLASLT), ("NVRTC", &NVRTC), ("cuDNN", &CUDNN)]
            .map(|(library, builds)| (library, self.open(builds).map(|l| l.path)))
            .into()
    }

    /// Opens NVRTC with the builtins beside it, for libraries that open both by name.
    pub(super) fn open_nvrtc(&self) -> Result<()> {
        let nvrtc = self.open(&NVRTC)?;
        let beside = nvrtc.path.parent().map_or(Vec::new(), |folder| matching(folder, NVRTC_BUILTINS));
        // If NVRTC was found by its bare name, the system's loader finds the builtins in the same way.
        beside.iter().try_for_each(|path| open(path).map(drop)).map_err(|why| Error::resource("open NVRTC's builtins", why))
    }
}

impl Library {
    /// Address of a function.
    ///
    /// # Errors
    /// `Resource` when this version of the library lacks the function.
    pub(super) fn symbol(&self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: the handle is open.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if address.is_null() {
            let symbol = name.to_string_lossy();
            return Err(Error::resource(format!("find {symbol} in {}", self.path.display()), "this version of the library lacks it"));
        }
        Ok(address)
    }
}

/// The CUDA release for which this cuDNN is built, such as 13. The function is called in cuDNN's graph library, because cuDNN ends the
/// process if that library is missing.
///
/// # Errors
/// `Resource` when the graph library is missing.
fn cuda_of_cudnn(cudnn: &Path) -> Result<u32> {
    let part = open(&cudnn.with_file_name(CUDNN_GRAPH)).map_err(|why| Error::resource("open cuDNN", why))?;
    let address = part.symbol(c"cudnnGetCudartVersion")?;
    // SAFETY: cuDNN's headers declare this name with this signature.
    let version = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> usize>(address) };
    // SAFETY: the function takes no arguments.
    Ok(unsafe { version() } as u32 / 1000)
}

/// Defines a table of C functions of a library, with their symbols and signatures. Status codes are plain integers, because a library may
/// have more codes than any enum here.
macro_rules! functions {
    ($(#[$doc:meta])* $visibility:vis $table:ident { $($field:ident = $symbol:literal($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        $visibility struct $table {
            $($visibility $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }
        impl $table {
            $visibility fn bind(library: &$crate::device::cuda::libraries::Library) -> $crate::error::Result<Self> {
                Ok(Self {
                    // SAFETY: the library's headers declare this name with this signature.
                    $($field: unsafe {
                        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>(
                            library.symbol($symbol)?
                        )
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;

fn open(path: &Path) -> std::result::Result<Library, String> {
    let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: runs the library's own initialisers, as linking with the library would.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: not null after a failure; copied before the next call of the loader.
        return Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
    }
    Ok(Library { handle, path: path.to_path_buf() })
}

/// Paths below `base` that match `pattern`, sorted. A `*` may stand only at the end of a path component and matches any characters.
fn matching(base: &Path, pattern: &str) -> Vec<PathBuf> {
    pattern.split('/').fold(vec![base.to_path_buf()], |folders, name| match name.strip_suffix('*') {
        Some(start) => folders.iter().flat_map(|folder| children(folder, start)).collect(),
        None => folders.iter().map(|folder| folder.join(name)).filter(|path| path.exists()).collect(),
    })
}

fn children(folder: &Path, start: &str) -> Vec<PathBuf> {
    let starts = |name: &OsStr| name.as_encoded_bytes().starts_with(start.as_bytes());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.filter(|entry| starts(&entry.file_name())).map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const NOWHERE: Builds = [
        Build { cuda: 13, soname: "libsuperoffload-test.so.2", package: "a-package==2.*" },
        Build { cuda: 12, soname: "libsuperoffload-test.so.1", package: "a-package-cu12==1.*" },
    ];

    fn with_folders(folders: &[&str]) -> TempDir {
        let root = TempDir::new().unwrap();
        folders.iter().for_each(|folder| fs::create_dir_all(root.path().join(folder)).unwrap());
        root
    }

    #[test]
    fn folders_are_tried_in_the_documented_order() {
        let expected = [
            "home/venv/lib/python3.12/site-packages/nvidia/cu13/lib",
            "home/venv/lib/python3.12/site-packages/nvidia/cudnn/lib",
            "usr/local/lib/python3.11/dist-packages/nvidia/cudnn/lib",
            "opt/conda/lib/python3.10/site-packages/nvidia/cu13/lib",
            "opt/tool/.venv/lib/python3.13/site-packages/nvidia/cu13/lib",
            "usr/local/cuda/lib64",
            "usr/local/cuda/targets/sbsa-linux/lib",
        ];
        let root = with_folders(&expected);
        let named = PathBuf::from("/named");
        let pythons = [root.path().join("home/venv"), root.path().join("usr/local"), root.path().join("absent")];
        let libraries = Libraries::below(root.path(), std::slice::from_ref(&named), &pythons, 13);
        let expected = expected.map(|folder| root.path().join(folder));
        assert_eq!(libraries.folders[0], named);
        assert_eq!(libraries.folders[1..], expected);
    }

    #[test]
    fn a_missing_library_names_places_reasons_and_the_package() {
        let root = with_folders(&["a"]);
        let file = root.path().join("a").join(NOWHERE[1].soname);
        fs::write(&file, "no library").unwrap();
        let libraries = Libraries { folders: vec![root.path().join("a"), root.path().join("b")], cuda: 13 };
        let message = libraries.open(&NOWHERE).err().unwrap().to_string();
        for part in
            ["open libsuperoffload-test.so.2", "/a, ", "/b]", file.to_str().unwrap(), "pip install 'a-package==2.*'", "--cuda-libraries"]
        {
            assert!(message.contains(part), "{part} in {message}");
        }
    }

    #[test]
    fn a_driver_gets_libraries_that_it_serves() {
        let root = with_folders(&["a"]);
        fs::write(root.path().join("a").join(NOWHERE[0].soname), "no library").unwrap();
        let message = |cuda| Libraries { folders: vec![root.path().join("a")], cuda }.open(&NOWHERE).err().unwrap().to_string();
        assert!(
            message(14).contains("test.so.2: file too short") && message(14).contains("pip install 'a-package==2.*'"),
            "{}",
            message(14)
        );
        let old = message(12);
        assert!(old.contains("open libsuperoffload-test.so.1") && old.contains("pip install 'a-package-cu12==1.*'"), "{old}");
        assert!(!old.contains("so.2"), "a library of CUDA 13 was tried: {old}");
    }

    const LIBC: Builds = [Build { cuda: 13, soname: "libc.so.6", package: "" }, Build { cuda: 12, soname: "libm.so.6", package: "" }];

    #[test]
    fn a_library_is_found_by_path_and_by_the_loader() {
        let by_name = Libraries { folders: Vec::new(), cuda: 13 }.open(&LIBC).unwrap();
        assert_eq!(by_name.path, Path::new("libc.so.6"));
        assert!(by_name.symbol(c"malloc").is_ok());
        let message = by_name.symbol(c"no_such_function").unwrap_err().to_string();
        assert!(message.contains("find no_such_function in libc.so.6"), "{message}");
    }
}
