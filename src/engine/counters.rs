//! How much was moved and stepped: counted by the driver, so that a report can name rates.

/// A struct of counts that are added and subtracted field by field.
macro_rules! amounts {
    ($(#[$of:meta])* $vis:vis struct $name:ident { $($(#[$about:meta])* pub $field:ident: u64,)+ }) => {
        $(#[$of])*
        $vis struct $name {
            $($(#[$about])* pub $field: u64,)+
        }

        impl $name {
            /// The amounts, in their order.
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
pub(super) use amounts;

amounts! {
    /// Amounts since the engine began, or between two reports. Counted when work is given out, not when it is done.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
    pub struct Counters {
        /// Bytes of gradients, or of paged states, sent to host memory.
        pub d2h_bytes: u64,
        /// Bytes of parameters, or of paged states, sent to the device.
        pub h2d_bytes: u64,
        /// Parameters whose weights the optimizer's pool computed; a redone or restored bucket counts again.
        pub adam_elems: u64,
        /// Bytes that those passes read and wrote.
        pub adam_bytes: u64,
        /// Nanoseconds in which the pool had a job.
        pub adam_busy_ns: u64,
    }
}

amounts! {
    /// Time of idle compute, by cause, in nanoseconds.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Exposed {
        /// A forward pass waited for the optimizer, or a backward pass for slots that it keeps.
        pub cpu_ns: u64,
        /// One of them waited for a copy.
        pub transfer_ns: u64,
        /// Gradients, weights or reports of other ranks were waited for.
        pub peer_ns: u64,
    }
}
