//! Exchange of slices between GPUs of several processes by NVIDIA's NCCL. NCCL only moves bytes and adds nothing, so bits do not depend on
//! its algorithms. The communicator is non-blocking, so a process whose peer has died receives an error and ends.

use super::driver::RawStream;
use super::libraries::{Libraries, NCCL, functions};
use super::open::newest_cuda;
use crate::device::Swap;
use crate::error::{Error, Result};
use crate::ranks::{NcclUniqueId, RankContext};
use cust::sys;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

/// The oldest supported release, 2.27: its communicators can be aborted at any time. The number is NCCL's version code.
const OLDEST: i32 = 22_700;
/// Disables sums in the switch: their bits would depend on the release, and some machines forbid multicast between GPUs. NCCL reads the
/// variable once.
const NO_MULTICAST: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

/// Result codes of NCCL.
const SUCCESS: i32 = 0;
const IN_PROGRESS: i32 = 7;
/// Data type of bytes in NCCL.
const UINT8: i32 = 1;
/// Maximum time for an aborted communicator to end its kernels.
const ABORT_PATIENCE: Duration = Duration::from_secs(5);

functions! {
    Nccl {
        version = c"ncclGetVersion"(*mut i32) -> i32;
        error_string = c"ncclGetErrorString"(i32) -> *const c_char;
        last_error = c"ncclGetLastError"(*mut c_void) -> *const c_char;
        unique_id = c"ncclGetUniqueId"(*mut NcclUniqueId) -> i32;
        init = c"ncclCommInitRankConfig"(*mut *mut c_void, i32, NcclUniqueId, i32, *mut CommConfig) -> i32;
        async_error = c"ncclCommGetAsyncError"(*mut c_void, *mut i32) -> i32;
        group_start = c"ncclGroupStart"() -> i32;
        group_end = c"ncclGroupEnd"() -> i32;
        send = c"ncclSend"(*const c_void, usize, i32, i32, *mut c_void, *mut c_void) -> i32;
        receive = c"ncclRecv"(*mut c_void, usize, i32, i32, *mut c_void, *mut c_void) -> i32;
        abort = c"ncclCommAbort"(*mut c_void) -> i32;
    }
}

/// The beginning of `ncclConfig_t` in NCCL 2.27. Later releases read as many bytes as `size` states and use defaults for the rest.
#[repr(C)]
struct CommConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
}

impl CommConfig {
    /// Calls return at once; all other options are NCCL's defaults.
    fn non_blocking() -> Self {
        const MAGIC: u32 = 0xcafe_beef;
        const UNDEFINED: i32 = i32::MIN;
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: OLDEST as u32,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
        }
    }
}

/// Disables multicast in NCCL. Called while the process has one thread.
///
/// # Safety
/// No other thread reads or writes the environment.
pub(crate) unsafe fn forbid_multicast() {
    // SAFETY: by this function's contract.
    unsafe { std::env::set_var(NO_MULTICAST.0, NO_MULTICAST.1) };
}

/// The release of the installed NCCL, such as `2.28.9`; the folders `named` are searched first.
///
/// # Errors
/// `Resource` when no NCCL is found, `Unsupported` when it is too old; `Usage` unless the environment variable disables multicast.
pub(crate) fn release(named: &[PathBuf]) -> Result<String> {
    open(named).map(|(_, version)| in_words(version))
}

/// A key for a new communicator, which all of its processes need.
///
/// # Errors
/// The errors of [`release`]; errors of NCCL.
pub(crate) fn new_key(named: &[PathBuf]) -> Result<NcclUniqueId> {
    let (nccl, _) = open(named)?;
    let mut key = NcclUniqueId([0; 128]);
    // SAFETY: writes the 128 bytes of a key.
    nccl.check(unsafe { (nccl.unique_id)(&mut key) }, ptr::null_mut(), "make the key of a communicator")?;
    Ok(key)
}

fn in_words(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

fn open(named: &[PathBuf]) -> Result<(Nccl, i32)> {
    let (name, value) = NO_MULTICAST;
    if std::env::var(name).as_deref() != Ok(value) {
        return Err(Error::usage(format!("NCCL: set {name}={value} before the program starts, or use --transport tcp")));
    }
    let library = Libraries::new(named, newest_cuda()?).open(&NCCL)?;
    let nccl = Nccl::bind(&library)?;
    let mut version = 0;
    // SAFETY: writes one integer.
    nccl.check(unsafe { (nccl.version)(&mut version) }, ptr::null_mut(), "query the version of NCCL")?;
    is_new_enough(version, &library.path)?;
    Ok((nccl, version))
}

/// # Errors
/// `Unsupported` with both releases.
fn is_new_enough(version: i32, path: &Path) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    let remedy = "`pip install --upgrade nvidia-nccl-cu13`, or name a newer one's folder with --cuda-libraries";
    Err(Error::Unsupported(format!("{} is NCCL {}, and 2.27 is the oldest that works; {remedy}", path.display(), in_words(version))))
}

impl Nccl {
    fn check(&self, status: i32, comm: *mut c_void, operation: &str) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: every code has a text; the communicator may be null.
        let texts = unsafe { [(self.error_string)(status), (self.last_error)(comm)] };
        let message = texts.map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL's texts end in NUL, and the text is copied before this thread's next call.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        });
        let remedy = "set NCCL_DEBUG=INFO for details, or use --transport tcp";
        Err(Error::resource(operation.to_string(), format!("NCCL error {status} ({}): {}; {remedy}", message[0], message[1].trim())))
    }
}

/// Connection from this GPU to the GPUs of the other processes. All exchanges are enqueued on one stream, in the same order on all ranks.
pub(super) struct NcclCommunicator {
    nccl: Nccl,
    comm: *mut c_void,
    /// Context of the GPU, in which the communicator is aborted.
    context: sys::CUcontext,
}

impl NcclCommunicator {
    /// Opens the connection for the GPU of `context`, which is current. Returns when all other ranks have opened theirs.
    ///
    /// # Errors
    /// The errors of [`release`]; errors of NCCL; the failure of another rank.
    pub(super) fn open(named: &[PathBuf], key: &NcclUniqueId, rank_context: &RankContext, context: sys::CUcontext) -> Result<Self> {
        let (nccl, _) = open(named)?;
        let (ranks, rank, mut config) = (rank_context.progress.ranks() as i32, rank_context.rank as i32, CommConfig::non_blocking());
        // Leaked, because a thread of NCCL may write the handle as long as it joins, even after this function has given up.
        let comm: &'static mut *mut c_void = Box::leak(Box::new(ptr::null_mut()));
        // SAFETY: writes one handle, which is leaked, and reads key and configuration before it returns.
        let status = unsafe { (nccl.init)(comm, ranks, *key, rank, &mut config) };
        let communicator = Self { nccl, comm: *comm, context };
        communicator.finish(status, rank_context, "join the GPUs of all processes")?;
        Ok(communicator)
    }

    /// Enqueues all of `swaps` on `stream` as one operation, which ends when the peers have done their parts.
    ///
    /// # Errors
    /// Errors of NCCL; the failure of another rank.
    pub(super) fn swap(&self, stream: &RawStream, swaps: &[Swap], rank_context: &RankContext) -> Result<()> {
        const WHAT: &str = "exchange slices with the GPUs of other processes";
        let Self { nccl, comm, .. } = *self;
        let stream = stream.0.cast();
        // SAFETY: the function takes no arguments.
        nccl.check(unsafe { (nccl.group_start)() }, comm, WHAT)?;
        let mut status = SUCCESS;
        for &Swap { peer, out, into } in swaps {
            let mut call = |bytes: usize, enqueue: &dyn Fn() -> i32| {
                if bytes > 0 && matches!(status, SUCCESS | IN_PROGRESS) {
                    status = enqueue();
                }
            };
            let peer = peer as i32;
            // SAFETY: the slice is this device's memory, and it is not written before the stream has passed this point.
            call(out.bytes(), &|| unsafe { (nccl.send)(out.addr() as *const _, out.bytes(), UINT8, peer, comm, stream) });
            // SAFETY: the slice is this device's memory, and it has no other user before the stream has passed this point.
            call(into.bytes(), &|| unsafe { (nccl.receive)(into.addr() as *mut _, into.bytes(), UINT8, peer, comm, stream) });
        }
        // SAFETY: ends the group that was started above, also after an error.
        let ended = unsafe { (nccl.group_end)() };
        self.finish(if matches!(status, SUCCESS | IN_PROGRESS) { ended } else { status }, rank_context, WHAT)
    }

    /// Waits until the host side of a call is done; the GPU may still be executing it.
    fn finish(&self, status: i32, rank_context: &RankContext, operation: &str) -> Result<()> {
        let mut state = status;
        while state == IN_PROGRESS {
            rank_context.check()?;
            thread::yield_now();
            // SAFETY: the communicator is live; writes one integer.
            self.nccl.check(unsafe { (self.nccl.async_error)(self.comm, &mut state) }, self.comm, operation)?;
        }
        self.nccl.check(state, self.comm, operation)
    }

    /// Checks for asynchronous errors.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub(super) fn check(&self) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: as above.
        let status = unsafe { (self.nccl.async_error)(self.comm, &mut state) };
        self.nccl.check(if status == SUCCESS { state } else { status }, self.comm, "exchange slices with the GPUs of other processes")
    }
}

/// A communicator and its context, which another thread may use.
struct CommHandle(*mut c_void, sys::CUcontext);

// SAFETY: a communicator may be used by any thread, one at a time; a context may be current on several threads.
unsafe impl Send for CommHandle {}

impl Drop for NcclCommunicator {
    /// Aborts the communicator, which ends kernels that wait for a dead process. If the abort does not end, the watchdog ends the process.
    /// At a regular end no kernel is pending, and the abort only frees memory.
    fn drop(&mut self) {
        if self.comm.is_null() {
            return;
        }
        let (abort, handle) = (self.nccl.abort, CommHandle(self.comm, self.context));
        let body = move || {
            let CommHandle(comm, context) = { handle };
            // SAFETY: the context is live until this thread has ended, or the process has ended. The owner of the communicator is being
            // dropped, so there is no other call of NCCL with it.
            unsafe {
                sys::cuCtxSetCurrent(context);
                abort(comm);
            }
        };
        let Ok(thread) = thread::Builder::new().name("end nccl".into()).spawn(body) else { return };
        let deadline = Instant::now() + ABORT_PATIENCE;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_release_is_refused_with_both_numbers() {
        let refused = is_new_enough(22_602, Path::new("/lib/libnccl.so.2")).unwrap_err().to_string();
        assert!(refused.contains("/lib/libnccl.so.2 is NCCL 2.26.2") && refused.contains("2.27 is the oldest"), "{refused}");
        assert!(is_new_enough(22_700, Path::new("")).is_ok() && is_new_enough(23_005, Path::new("")).is_ok());
        assert_eq!(in_words(22_809), "2.28.9");
    }

    #[test]
    fn the_configuration_is_laid_out_as_in_nccl_h() {
        assert_eq!((size_of::<CommConfig>(), size_of::<NcclUniqueId>()), (40, 128));
        assert_eq!(std::mem::offset_of!(CommConfig, blocking), 16);
    }
}
