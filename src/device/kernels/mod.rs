//! The arithmetic of a transformer and of transfers: one value for each kernel, one file for each file of PTX.

pub(super) mod attention;
pub(super) mod cross_entropy;
pub(super) mod delta;
pub(super) mod embed;
pub(super) mod experts;
pub(super) mod gated_norm;
pub(super) mod grouped;
pub(super) mod key_gradients;
pub(super) mod latent;
pub(super) mod mxfp4;
pub(super) mod norm;
pub(super) mod normed_values;
pub(super) mod pointwise;
pub(super) mod product;
pub(super) mod quantize;
pub(super) mod rope;
pub(super) mod route;
pub(super) mod scores;
pub(super) mod short_conv;
pub(super) mod sinks;
pub(super) mod teacher;
pub(super) mod transfer;

pub use self::{
    attention::*, cross_entropy::*, delta::*, embed::*, experts::*, gated_norm::*, grouped::*, key_gradients::*, latent::*, mxfp4::*,
    norm::*, normed_values::*, pointwise::*, product::*, quantize::*, rope::*, route::*, scores::*, short_conv::*, sinks::*, teacher::*,
    transfer::*,
};
use super::Device;
use super::kernel::{Checked, Kernel};
use crate::error::Result;

/// A device that supports the kernel `K`.
pub trait Launch<K: Kernel>: Device {
    /// Checks the operands of `kernel` and enqueues it.
    ///
    /// # Errors
    /// `Resource` when an operand has a wrong size or format, overlaps a written operand, or is not this device's memory; `Unsupported`
    /// when the device has no kernel for these formats or sizes.
    fn launch(&mut self, kernel: K) -> Result<()> {
        let checked = Checked::new(kernel, |memory| self.check_memory(memory))?;
        self.accept(checked)
    }

    /// Enqueues a checked kernel; [`Launch::launch`] calls it.
    ///
    /// # Errors
    /// `Unsupported` when the device has no kernel for these formats or sizes.
    fn accept(&mut self, kernel: Checked<K>) -> Result<()>;
}

/// Implements [`Launch`] for `$device` by the method `$accept`: for the kernels given, and for the kernels that all devices launch alike. An
/// implementation for all kernels of a trait would be compiled again in each program and test that launches one, with the arithmetic of that
/// kernel. These implementations are compiled once.
macro_rules! launches {
    ($device:ty, $accept:ident: $($own:ident),+) => {
        const _: () = {
            use $crate::device::*;
            $crate::device::kernels::launches! {
                @each $device, $accept: $($own),+,
                CrossEntropyStats, CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, PairLosses, PolicyLosses,
                DeltaRule, DeltaRuleBackward,
                Embed, EmbedBackward,
                ClampedSwiglu, ExpertBias, ExpertBackward, ExpertBiasDot, ScaleChoices, ScaleChoicesBackward,
                GatedNorm, GatedNormBackward,
                GroupedMatmul, SegmentSums,
                AddKeyGradients,
                AssembleHeads, AssembleHeadsBackward, ResizeRows,
                ExpandMxfp4,
                RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward,
                Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, SigmoidGate, SigmoidGateBackward,
                BiasBackward,
                AbsMaxScale, Quantize,
                QkNorm, QkNormBackward, Rope,
                QkvNorm, QkvNormBackward, ScaleBy,
                RouterLogits, Route, Segments, Dispatch, Combine, RouterBackward, RouterBalance,
                MaskedSoftmax, SoftmaxBackward, RoundSums,
                ShortConv, ShortConvBackward,
                Sinks, SinksBackward,
                TeacherStats, TeacherLosses, TeacherGrad,
                Poke,
                WithScale<RmsNorm>, WithScale<RmsNormBackward>, WithScale<LayerNorm>, WithScale<LayerNormBackward>,
                WithScale<Swiglu>, WithScale<SwigluBackward>, WithScale<Geglu>, WithScale<GegluBackward>,
                WithScale<Gelu>, WithScale<GeluBackward>, WithScale<ScaleAdd>
            }
        };
    };
    (@each $device:ty, $accept:ident: $($kernel:ty),+) => {$(
        impl $crate::device::Launch<$kernel> for $device {
            #[inline(never)]
            fn launch(&mut self, kernel: $kernel) -> $crate::error::Result<()> {
                let checked = $crate::device::Checked::new(kernel, |memory| $crate::device::Device::check_memory(self, memory))?;
                self.$accept(checked)
            }
            fn accept(&mut self, kernel: $crate::device::Checked<$kernel>) -> $crate::error::Result<()> {
                self.$accept(kernel)
            }
        }
    )+};
}
pub(super) use launches;

/// A trait for all devices that support each of these kernels; kernels after the semicolon are also supported with [`WithScale`].
macro_rules! sum {
    (
        $(#[$doc:meta])*
        $name:ident = $($file:ident::{$($kernel:ident),+}),+; $($scaling_file:ident::{$($scaling:ident),+}),+ $(,)?
    ) => {
        $(#[$doc])*
        pub trait $name:
            Device $($(+ Launch<$file::$kernel>)+)+ $($(+ Launch<WithScale<$scaling_file::$scaling>>)+)+ {}
        impl<D: Device $($(+ Launch<$file::$kernel>)+)+ $($(+ Launch<WithScale<$scaling_file::$scaling>>)+)+> $name for D {}
    };
}

sum! {
    /// Every kernel of a training step.
    Kernels =
        attention::{AttentionForward, AttentionBackward},
        cross_entropy::{CrossEntropyStats, CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, PairLosses, PolicyLosses},
        delta::{DeltaRule, DeltaRuleBackward},
        embed::{Embed, EmbedBackward, ScatterRows},
        experts::{ClampedSwiglu, ExpertBias, ExpertBackward, ExpertBiasDot, ScaleChoices, ScaleChoicesBackward},
        gated_norm::{GatedNorm, GatedNormBackward},
        grouped::{GroupedMatmul, SegmentSums},
        key_gradients::{AddKeyGradients},
        latent::{AssembleHeads, AssembleHeadsBackward, ResizeRows},
        mxfp4::{ExpandMxfp4},
        norm::{RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward},
        normed_values::{QkvNorm, QkvNormBackward, ScaleBy},
        pointwise::{Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, SigmoidGate, SigmoidGateBackward},
        product::{Matmul, ScaledMatmul, BiasBackward},
        quantize::{AbsMaxScale, Quantize},
        rope::{QkNorm, QkNormBackward, Rope},
        route::{RouterLogits, Route, Segments, Dispatch, Combine, RouterBackward, RouterBalance},
        scores::{BatchedMatmul, MaskedSoftmax, SoftmaxBackward, RoundSums},
        short_conv::{ShortConv, ShortConvBackward},
        sinks::{Sinks, SinksBackward},
        teacher::{TeacherStats, TeacherLosses, TeacherGrad},
        transfer::{Zero, Cast, SumSlices, GradNormPartials, Adam, SplitAdam, Poke};
        norm::{RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward},
        pointwise::{Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd},
}
