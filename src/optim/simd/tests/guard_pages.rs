//! Slices next to inaccessible pages: a pass that reads or writes one element too far crashes.

use super::*;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// At least the size of any page, and a multiple of all page sizes.
const PAGE: usize = 65536;

/// The end of the slice that touches a guard page.
#[derive(Clone, Copy, Debug)]
enum Touching {
    First,
    Last,
}

/// A slice within one page, between two guard pages.
struct Guarded<T> {
    mapping: NonNull<c_void>,
    start: usize,
    elems: usize,
    holds: PhantomData<T>,
}

impl<T: Element> Guarded<T> {
    fn new(values: &[T], touching: Touching) -> Self {
        assert!(size_of_val(values) <= PAGE);
        let bytes = NonZeroUsize::new(3 * PAGE).unwrap();
        // SAFETY: new memory; only its middle may be accessed.
        let mapping = unsafe {
            let mapping = mmap_anonymous(None, bytes, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE).unwrap();
            mprotect(mapping.byte_add(PAGE), PAGE, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).unwrap();
            mapping
        };
        let start = match touching {
            Touching::First => PAGE,
            Touching::Last => 2 * PAGE - size_of_val(values),
        };
        let mut guarded = Self { mapping, start, elems: values.len(), holds: PhantomData };
        guarded.slice().copy_from_slice(values);
        guarded
    }

    fn slice(&mut self) -> &mut [T] {
        // SAFETY: inside the accessible page, aligned because pages are aligned, initially zero, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.byte_add(self.start).cast().as_ptr(), self.elems) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and no slice of it is left.
        unsafe { munmap(self.mapping, 3 * PAGE).unwrap() };
    }
}

fn check<M: Moment, G: Element, O: Element>(touching: Touching) {
    for len in (0..=67).chain([128, 1000, 4099]) {
        let Case { first, params, m, v, grads, pending_grads, out } = Case::<M, G, O>::ordinary(len);
        let (mut params, mut moments) = (Guarded::new(&params, touching), [m, v].map(|values| Guarded::new(&values, touching)));
        let [mut grads, mut pending_grads] = [grads, pending_grads].map(|values| Guarded::new(&values, touching));
        let mut out = Guarded::new(&out, touching);
        for isa in Isa::available() {
            for (pass, stores) in PASSES.into_iter().flat_map(|pass| STORES.map(|stores| (pass, stores))) {
                let kernels = AdamKernels::new(isa).unwrap().with_stores(stores);
                let [m, v] = moments.each_mut().map(Guarded::slice);
                let grads = [&*pending_grads.slice(), grads.slice()];
                run(kernels, pass, steps(), AdamState { first, params: params.slice(), m, v }, grads, out.slice());
            }
            let read = Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(grads.slice()));
            AdamKernels::new(isa).unwrap().partials(read, &mut vec![0.0; len.div_ceil(norm::BLOCK)]);
        }
    }
}

#[test]
fn no_pass_reaches_beyond_its_slices() {
    for touching in [Touching::First, Touching::Last] {
        check::<f32, f32, f32>(touching);
        check::<f32, bf16, bf16>(touching);
        check::<f32, f16, f16>(touching);
        check::<bf16, f32, f32>(touching);
        check::<bf16, bf16, bf16>(touching);
    }
}
