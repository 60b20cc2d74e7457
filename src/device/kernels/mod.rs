//! The arithmetic of a transformer and of the transfer path: a value for each kernel, in a file for each file of PTX.

pub(super) mod attention;
pub(super) mod cross_entropy;
pub(super) mod embed;
pub(super) mod experts;
pub(super) mod grouped;
pub(super) mod key_gradients;
pub(super) mod norm;
pub(super) mod pointwise;
pub(super) mod product;
pub(super) mod quantize;
pub(super) mod rope;
pub(super) mod route;
pub(super) mod sinks;
pub(super) mod transfer;

use super::Device;
use super::kernel::{Checked, Kernel};
use crate::error::Result;
use quantize::WithScale;

/// A device that has the kernel `K`.
pub trait Launch<K: Kernel>: Device {
    /// Enqueues `kernel` once its operands have been found right.
    ///
    /// # Errors
    /// `Resource` when an operand has a wrong size or format, overlaps what is written, or is not this device's; `Unsupported` when the device
    /// has no kernel for these formats or sizes.
    fn launch(&mut self, kernel: K) -> Result<()> {
        let checked = Checked::new(kernel, |memory| self.check_memory(memory))?;
        self.accept(checked)
    }

    /// Enqueues what has been checked: [`Launch::launch`] calls it.
    ///
    /// # Errors
    /// `Unsupported` as there.
    fn accept(&mut self, kernel: Checked<K>) -> Result<()>;
}

/// A trait for all devices that have each of these kernels, and those behind the semicolon also [`WithScale`].
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
        cross_entropy::{CrossEntropyStats, CrossEntropyGrad, CrossEntropyLoss},
        embed::{Embed, EmbedBackward, ScatterRows},
        experts::{ClampedSwiglu, ExpertBias, ExpertBackward, ExpertBiasDot},
        grouped::{GroupedMatmul, SegmentSums},
        key_gradients::{AddKeyGradients},
        norm::{RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward},
        pointwise::{Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd},
        product::{Matmul, ScaledMatmul, BiasBackward},
        quantize::{AbsMaxScale, Quantize},
        rope::{QkNorm, QkNormBackward, Rope},
        route::{RouterLogits, Route, Segments, Dispatch, Combine, RouterBackward, RouterBalance},
        sinks::{Sinks, SinksBackward},
        transfer::{Zero, Cast, SumSlices, GradNormPartials, Adam, Poke};
        norm::{RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward},
        pointwise::{Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd},
}
