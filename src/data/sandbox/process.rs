//! A forked process and its kernel limits.
//!
//! Unsafe, since a fork of a process with several threads copies one of them alone, and locks that another thread held stay locked. The C
//! library renews the locks of its allocator and of its threads. The child takes no lock that this crate or the standard library
//! shares between threads, and runs libraries that no other thread of the parent has entered.
#![allow(unsafe_code)]

use super::task::STACK_BYTES;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, signal};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, dup2_raw, dup2_stderr, dup2_stdin, dup2_stdout, fork};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

/// Signals that ask a program to end or to save: they reach every process of a terminal or of a job, and the parent answers them.
const PARENTS_SIGNALS: [Signal; 8] =
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGXFSZ, Signal::SIGTSTP];
/// Signals that are reset to their default actions.
const OWN_SIGNALS: [Signal; 7] =
    [Signal::SIGPROF, Signal::SIGPIPE, Signal::SIGCHLD, Signal::SIGXCPU, Signal::SIGALRM, Signal::SIGSEGV, Signal::SIGBUS];
/// Where the child has its connection to the parent.
const SOCKET: RawFd = 3;
/// Descriptors up to here are given away again in the child.
const MOVED_FROM: RawFd = 10;
/// All that a child may print.
const PRINTED_BYTES_MAX: u64 = 1 << 20;
/// The child's exit code where it could not begin.
const CANNOT_BEGIN: i32 = 70;
/// How long a process that has nothing left to do may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// How a process ended: by a signal, or with a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessEnd {
    pub(super) signal: i32,
    pub(super) code: i32,
}

/// Forks. The child runs `body` with its end of a connection on a thread with a stack of its own and exits; its standard output and error
/// go to `notes`. With `bound` it is killed when the calling thread ends.
pub(super) fn start(socket: OwnedFd, notes: OwnedFd, bound: bool, body: impl FnOnce(OwnedFd) + Send) -> nix::Result<Pid> {
    // No handler of the parent's runs in the child before the child has its own.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    // SAFETY: the module's documentation explains why the child's code may follow a fork. The child never returns from here.
    let forked = unsafe { fork() };
    if let Ok(ForkResult::Child) = forked {
        let settled = settle(socket, notes, bound);
        exit(settled.map_or(CANNOT_BEGIN, |socket| run(socket, body)));
    }
    mask.thread_set_mask()?;
    match forked? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => exit(CANNOT_BEGIN),
    }
}

/// Makes the child a process of its own: signals, descriptors, limits. Gives its connection.
fn settle(socket: OwnedFd, notes: OwnedFd, bound: bool) -> nix::Result<OwnedFd> {
    let handlers = PARENTS_SIGNALS.map(|signal| (signal, SigHandler::SigIgn));
    for (kind, handler) in handlers.into_iter().chain(OWN_SIGNALS.map(|signal| (signal, SigHandler::SigDfl))) {
        // SAFETY: no handler is installed, only the kernel's own ways.
        unsafe { signal(kind, handler)? };
    }
    if bound {
        set_pdeathsig(Signal::SIGKILL)?;
    }
    let [socket, notes] = [moved(socket)?, moved(notes)?];
    dup2_stdin(open("/dev/null", OFlag::O_RDONLY, Mode::empty())?)?;
    dup2_stdout(&notes)?;
    dup2_stderr(&notes)?;
    // SAFETY: the former file of this descriptor is closed by this call, and nothing in this process refers to it any more.
    let own = unsafe { dup2_raw(&socket, SOCKET)? };
    // Closed with all others.
    std::mem::forget([socket, notes]);
    close_from(SOCKET + 1);
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    limit_files();
    // Where memory ends the kernel ends this process and not the parent.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    SigSet::empty().thread_set_mask()?;
    Ok(own)
}

/// Bounds the size of the process's output.
fn limit_files() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_FSIZE) {
        let _ = setrlimit(Resource::RLIMIT_FSIZE, soft.min(PRINTED_BYTES_MAX), hard);
    }
}

/// A copy of `descriptor` out of the way of those that the child needs.
fn moved(descriptor: OwnedFd) -> nix::Result<OwnedFd> {
    let copy = fcntl(&descriptor, FcntlArg::F_DUPFD_CLOEXEC(MOVED_FROM))?;
    std::mem::forget(descriptor);
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Closes all descriptors from `first` on: files, locks and connections of the parent.
fn close_from(first: RawFd) {
    // SAFETY: they are the parent's copies, which this process does not use.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if closed != 0 {
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(1 << 10, |(soft, _)| soft.min(1 << 20));
        for descriptor in first..most as RawFd {
            // SAFETY: as above; one that is not open need not be closed.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Runs `body` on a thread of its own; the exit code.
fn run(socket: OwnedFd, body: impl FnOnce(OwnedFd) + Send) -> i32 {
    on_own_stack(|| catch_unwind(AssertUnwindSafe(|| body(socket))).map_or(CANNOT_BEGIN, |()| 0))
}

/// A body for a thread, and the exit code that it returns.
struct ThreadJob<F> {
    body: Option<F>,
    code: i32,
}

/// Runs `body` on a thread of the C library with a large stack. A thread of the standard library takes a lock as it starts, which another
/// thread of the parent may have held at the fork.
fn on_own_stack<F: FnOnce() -> i32 + Send>(body: F) -> i32 {
    let mut job = ThreadJob { body: Some(body), code: CANNOT_BEGIN };
    let (mut attributes, mut thread) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: attributes and thread are used once they are initialised. The thread ends before the job does, and nothing else uses the job
    // until then.
    unsafe {
        let begins = libc::pthread_attr_init(attributes.as_mut_ptr()) == 0
            && libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES) == 0
            && libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), enter::<F>, (&raw mut job).cast()) == 0;
        if begins {
            libc::pthread_join(thread.assume_init(), std::ptr::null_mut());
        }
    }
    job.code
}

/// The first function of the thread of [`on_own_stack`].
extern "C" fn enter<F: FnOnce() -> i32>(job: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: a job of this type, which nothing else uses while the thread runs.
    let job = unsafe { &mut *job.cast::<ThreadJob<F>>() };
    job.code = job.body.take().map_or(CANNOT_BEGIN, |body| body());
    std::ptr::null_mut()
}

/// Ends the process without the parent's destructors and buffers.
fn exit(code: i32) -> ! {
    // SAFETY: it does not return.
    unsafe { libc::_exit(code) }
}

/// Takes an open descriptor that came over a connection.
pub(super) fn received(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the kernel made it for this process when the message was read, and it is taken once.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// Lets this process take `seconds` of CPU time from now on; then the kernel ends it by `SIGPROF`.
pub(super) fn limit_cpu(seconds: u32) {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: none, it_value: libc::timeval { tv_sec: seconds.into(), tv_usec: 0 } };
    // SAFETY: both pointers are valid; nothing else uses this timer.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) };
}

/// Lets this process have so much address space in all, unless it may have less anyway.
pub(super) fn limit_memory(bytes: u64) {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_AS) {
        let _ = setrlimit(Resource::RLIMIT_AS, bytes.min(hard), hard);
    }
}

/// Waits for a child, and how it ended; `None` where somebody else has waited for it.
pub(super) fn wait(pid: Pid) -> Option<ProcessEnd> {
    loop {
        match waitpid(pid, None) {
            Ok(WaitStatus::Exited(_, code)) => return Some(ProcessEnd { signal: 0, code }),
            Ok(WaitStatus::Signaled(_, signal, _)) => return Some(ProcessEnd { signal: signal as i32, code: 0 }),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return None,
        }
    }
}

/// Waits for a child that has nothing left to do, and kills one that does not end.
pub(super) fn end(pid: Pid) {
    let began = std::time::Instant::now();
    while began.elapsed() < ENDS_WITHIN {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => thread::sleep(Duration::from_micros(200)),
            Err(nix::errno::Errno::EINTR) => {}
            _ => return,
        }
    }
    end_now(pid);
}

/// Kills a child and waits for it.
pub(super) fn end_now(pid: Pid) {
    let _ = kill(pid, Signal::SIGKILL);
    wait(pid);
}
