//! Kernels for several instruction sets from one function body.
//!
//! A kernel is written once, in plain Rust with a fixed order of operations and explicit `mul_add`. [`vectorised`] compiles it as one
//! `#[target_feature]` function per instruction set. The compiler may not reorder or fuse float arithmetic, so all of them produce the same
//! bits and differ in speed only.

use std::fmt;

/// An instruction set that this machine supports. Only [`KernelIsa::detect`] and [`KernelIsa::available`] create values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelIsa(Level);

/// Instruction set levels, for `match`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The baseline of the architecture.
    Baseline,
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl KernelIsa {
    /// The widest supported instruction set.
    pub(crate) fn detect() -> Self {
        Self::available().last().unwrap_or(Self(Level::Baseline))
    }

    /// All supported instruction sets, narrow to wide.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        Level::ALL.iter().copied().filter(|level| level.is_supported()).map(Self)
    }

    /// The level, for `match`.
    #[inline(always)]
    pub(crate) fn level(self) -> Level {
        self.0
    }
}

impl fmt::Display for KernelIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Level::Baseline => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Level {
    const ALL: &[Self] = &[Self::Baseline, Self::Avx2, Self::Avx512];

    fn is_supported(self) -> bool {
        let avx2 = || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = || is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        let narrow = || is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq");
        match self {
            Self::Baseline => true,
            Self::Avx2 => avx2(),
            Self::Avx512 => avx2() && avx512() && narrow(),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Level {
    const ALL: &[Self] = &[Self::Baseline];

    fn is_supported(self) -> bool {
        true
    }
}

/// Compiles a function for every instruction set; the caller passes the [`KernelIsa`] as an additional first argument.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($t:ident $(: $bound:path)?),+>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($t: $crate::dtype::Element $(+ $bound)?),+>)? (
            isa: $crate::device::cpu::kernels::isa::KernelIsa, $($arg: $ty),*) $(-> $ret)? {
            use $crate::device::cpu::kernels::isa::Level;
            #[allow(clippy::too_many_arguments)]
            #[inline(always)]
            fn body $(<$($t: $crate::dtype::Element $(+ $bound)?),+>)? ($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($t: $crate::dtype::Element $(+ $bound)?),+>)? ($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512 $(<$($t: $crate::dtype::Element $(+ $bound)?),+>)? ($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            match isa.level() {
                Level::Baseline => body($($arg),*),
                // SAFETY: a `KernelIsa` of this level exists only if the processor supports it.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}
pub(crate) use vectorised;
