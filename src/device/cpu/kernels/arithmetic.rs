//! A kernel's arithmetic on the CPU, and the choice of its float format.

use super::Compute;
use crate::device::Kernel;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;

/// A kernel's arithmetic on the CPU in one float format; operands with a fixed format keep theirs.
pub(in crate::device::cpu) trait CpuArithmetic: Kernel {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>);
}

/// Compiles `$body` for each float format and runs the one for `$dtype`.
macro_rules! by_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::Dtype::Float32 => {
                type $t = f32;
                $body
            }
            $crate::dtype::Dtype::Bfloat16 => {
                type $t = half::bf16;
                $body
            }
            $crate::dtype::Dtype::Float16 => {
                type $t = half::f16;
                $body
            }
            other => Err($crate::error::Error::Unsupported(format!("arithmetic on {other}"))),
        }
    };
}
pub(in crate::device::cpu) use by_float;
