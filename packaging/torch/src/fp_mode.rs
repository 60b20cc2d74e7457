//! Floating-point mode of a thread during a step. `torch.set_flush_denormal` changes the mode of the calling thread and of threads that
//! start later, but not of threads in a running pool. Every piece therefore runs in the default mode of IEEE 754, so that results do not
//! depend on the thread.

/// Guard that keeps the calling thread in the default mode: no flushing of denormals, rounding to nearest.
pub(crate) struct DefaultMode(Word);

impl DefaultMode {
    pub(crate) fn enter() -> Self {
        let before = read();
        if before != DEFAULT {
            write(DEFAULT);
        }
        Self(before)
    }
}

impl Drop for DefaultMode {
    fn drop(&mut self) {
        if self.0 != DEFAULT {
            write(self.0);
        }
    }
}

#[cfg(target_arch = "x86_64")]
type Word = u32;
/// All exceptions masked, no exception flag set, rounding to nearest, denormals kept. The register also contains the flags of exceptions
/// that have occurred.
#[cfg(target_arch = "x86_64")]
const DEFAULT: Word = 0x1f80;

#[cfg(target_arch = "x86_64")]
fn read() -> Word {
    let mut word = 0;
    // SAFETY: stores MXCSR, which every x86-64 CPU has, to a local word.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack, preserves_flags)) };
    word
}

#[cfg(target_arch = "x86_64")]
fn write(word: Word) {
    // SAFETY: the word is `DEFAULT` or one that `read` returned, so that no reserved bit is set.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &word, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
type Word = u64;
#[cfg(target_arch = "aarch64")]
const DEFAULT: Word = 0;

#[cfg(target_arch = "aarch64")]
fn read() -> Word {
    let word;
    // SAFETY: FPCR may be read by every thread.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
    word
}

#[cfg(target_arch = "aarch64")]
fn write(word: Word) {
    // SAFETY: FPCR may be written by every thread, and the word is `DEFAULT` or one that `read` returned.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) word, options(nomem, nostack, preserves_flags)) };
}
