//! Amounts moved and stepped, counted by the driver for the rates of a report.

/// Defines a struct of counts that are added and subtracted field by field.
macro_rules! amounts {
    ($(#[$of:meta])* $vis:vis struct $name:ident { $($(#[$about:meta])* pub $field:ident: u64,)+ }) => {
        $(#[$of])*
        $vis struct $name {
            $($(#[$about])* pub $field: u64,)+
        }

        impl $name {
            /// The amounts, in the order of the fields.
            pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut u64> {
                [$(&mut self.$field),+].into_iter()
            }
        }

        impl std::ops::AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)+
            }
        }

        impl std::ops::Sub for $name {
            type Output = Self;

            fn sub(self, other: Self) -> Self {
                Self { $($field: self.$field - other.$field,)+ }
            }
        }
    };
}
pub(in crate::engine) use amounts;

amounts! {
    /// Amounts since the start of the engine, or between two reports. Work is counted when it is issued, not when it is complete.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
    pub struct Counters {
        /// Bytes of gradients, paged states and gradient sums sent to host memory.
        pub d2h_bytes: u64,
        /// Bytes of weights, paged states and gradient sums sent to the device.
        pub h2d_bytes: u64,
        /// Parameters stepped by the optimizer's pool; a redone or restored bucket counts again.
        pub adam_elems: u64,
        /// Bytes that these passes read and wrote.
        pub adam_bytes: u64,
        /// Nanoseconds in which the pool had a job.
        pub adam_busy_ns: u64,
    }
}

amounts! {
    /// Idle time of the compute stream by cause, in nanoseconds.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Exposed {
        /// A forward pass waited for the optimizer, or a backward pass for slots that the optimizer held.
        pub cpu_ns: u64,
        /// A forward or backward pass waited for a copy.
        pub transfer_ns: u64,
        /// The rank waited for gradients, weights or reports of its peers.
        pub peer_ns: u64,
    }
}
