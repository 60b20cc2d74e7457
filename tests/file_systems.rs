//! Systems that reject a call which a run can do without. The run prints one warning and trains to the same digest.

use crate::program::{Workspace, program, run};
use crate::support::emulator;
use std::process::Command;

/// A library that fails calls with the error codes in environment variables.
const REFUSALS: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
static int refused(const char *name) {
    const char *code = getenv(name);
    if (code) errno = atoi(code);
    return code != NULL;
}
int fsync(int fd) {
    struct stat of;
    if (!fstat(fd, &of) && S_ISDIR(of.st_mode) && refused("DIRECTORY_SYNC")) return -1;
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int flock(int fd, int how) { return refused("LOCK") ? -1 : ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, how); }
int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *mask) {
    if (refused("AFFINITY")) return errno ? -1 : 0;
    return ((int (*)(pid_t, size_t, const cpu_set_t *))dlsym(RTLD_NEXT, "sched_setaffinity"))(pid, size, mask);
}
"#;

/// Builds the library; `None` in an emulator, which cannot load it.
fn refusals(workspace: &Workspace) -> Option<std::path::PathBuf> {
    let (source, library) = (workspace.write("refusals.c", REFUSALS), workspace.path("refusals.so"));
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl").output();
    assert!(built.unwrap_or_else(|e| panic!("cc: {e}; a C compiler is needed")).status.success());
    emulator().is_none().then_some(library)
}

#[test]
fn a_file_system_without_fsync_of_directories_is_warned_of_once_and_saves_the_same() {
    let workspace = Workspace::new();
    let Some(library) = refusals(&workspace) else { return };
    let alone = run(&mut workspace.train("alone", &[]));
    for errno in [libc::EINVAL, libc::ENOTSUP, libc::EBADF, libc::ENOSYS] {
        let out = format!("r-{errno}");
        let trained = run(workspace.train(&out, &[]).env("LD_PRELOAD", &library).env("DIRECTORY_SYNC", errno.to_string()));
        assert_eq!(trained.digest(), alone.digest());
        let message = format!("{}: this file system has no fsync of directories (", workspace.path(&out).display());
        assert_eq!(trained.stdout.lines().filter(|line| line.starts_with(&message)).count(), 1, "{trained:?}");
        assert!(trained.stderr.is_empty(), "{trained:?}");
        let mut export = program(&["export"]);
        export.arg(workspace.path(&out)).arg(workspace.path(&format!("model-{errno}")));
        let exported = run(export.env("LD_PRELOAD", &library).env("DIRECTORY_SYNC", errno.to_string()));
        assert!(exported.code == 0 && exported.stderr.contains("has no fsync of directories"), "{exported:?}");
    }
    let failed = run(workspace.train("broken", &[]).env("LD_PRELOAD", &library).env("DIRECTORY_SYNC", libc::EIO.to_string()));
    failed.refused(1, &["fsync", "broken: Input/output error"]);
}

#[test]
fn a_lock_that_is_refused_as_invalid_is_a_file_system_without_locks() {
    let workspace = Workspace::new();
    let Some(library) = refusals(&workspace) else { return };
    let alone = run(&mut workspace.train("alone", &[]));
    for errno in [libc::EINVAL, libc::ENOLCK, libc::ENOTSUP, libc::EBADF, libc::ENOSYS] {
        let out = format!("r-{errno}");
        let trained = run(workspace.train(&out, &[]).env("LD_PRELOAD", &library).env("LOCK", errno.to_string()));
        assert_eq!(trained.digest(), alone.digest());
        assert_eq!(trained.stderr.matches("this file system has no locks").count(), 1, "{trained:?}");
    }
}

/// With error 0 the call succeeds and does nothing.
#[test]
fn unpinnable_threads_cause_one_warning_and_the_run_continues() {
    let workspace = Workspace::new();
    let Some(library) = refusals(&workspace) else { return };
    let alone = run(&mut workspace.train("alone", &[]));
    for errno in [libc::EPERM, libc::ENOSYS, libc::EINVAL, 0] {
        let refused = |out: &str, flags: &[&str]| {
            run(workspace.train(&format!("{out}-{errno}"), flags).env("LD_PRELOAD", &library).env("AFFINITY", errno.to_string()))
        };
        let trained = refused("r", &[]);
        assert_eq!(trained.digest(), alone.digest());
        let pins = cfg!(feature = "mpam");
        assert_eq!(trained.stderr.matches("warning: threads are not pinned to CPUs: ").count(), usize::from(pins), "{trained:?}");
        assert_eq!(trained.stderr.lines().count(), usize::from(pins), "{trained:?}");
        if pins {
            assert_eq!(refused("without", &["--without=mpam"]).stderr, "");
        }
    }
}

#[test]
fn a_step_that_passes_over_the_data_several_times_is_warned_of() {
    let workspace = Workspace::new();
    workspace.write("data.txt", "one line of text or two");
    let trained = run(&mut workspace.train("r", &["--gradient-accumulation-steps=16", "--max-steps=1"]));
    let message = "\na step takes 32 sequences, the data has 1: each step passes over the data at least 32 times\n";
    assert!(trained.code == 0 && trained.stdout.contains(message), "{trained:?}");
}
