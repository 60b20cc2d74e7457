//! The gated delta rule.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{DeltaRule, DeltaRuleBackward};
use crate::dtype::Element;

impl CpuArithmetic for DeltaRule {
    fn run<T: Element>(self, _cx: &mut Compute, _memory: &TaskMemory<'_>) {
        unimplemented!("the delta rule on a CPU")
    }
}

impl CpuArithmetic for DeltaRuleBackward {
    fn run<T: Element>(self, _cx: &mut Compute, _memory: &TaskMemory<'_>) {
        unimplemented!("the delta rule's backward pass on a CPU")
    }
}
