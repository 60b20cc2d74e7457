//! Vectors of integers for the codec of 8-bit moments.

use crate::optim::int8::BLOCK;

/// Lanes of a vector of words.
pub(super) const LANES: usize = 16;

/// Vectors of words in a block.
pub(super) const HALVES: usize = BLOCK / LANES;

/// Vectors of an instruction set: of 16 words of 32 bits, or of the 32 half words of a block. Half words may have any order in a vector:
/// [`Vectors::narrow`], [`Vectors::store_upper`], [`Vectors::load_codes`] and [`Vectors::store_codes`] have the same one.
///
/// # Safety
/// The caller of a function runs with the instruction set.
pub(super) trait Vectors: Copy {
    /// 16 words.
    type Words: Copy;
    /// 32 half words.
    type Halves: Copy;

    /// All words `value`.
    unsafe fn splat(value: u32) -> Self::Words;
    /// 16 of the words `from`, from `at` on.
    unsafe fn load_bits(from: &[u32; BLOCK], at: usize) -> Self::Words;
    /// `a & b`.
    unsafe fn and(a: Self::Words, b: Self::Words) -> Self::Words;
    /// `a + b`.
    unsafe fn add(a: Self::Words, b: Self::Words) -> Self::Words;
    /// `a >> BITS`, unsigned.
    unsafe fn shift<const BITS: u32>(a: Self::Words) -> Self::Words;

    /// The words of a block as half words; all words have at most 16 bits.
    unsafe fn narrow(words: [Self::Words; HALVES]) -> Self::Halves;
    /// Half words with the signs of words.
    unsafe fn narrow_signs(words: [Self::Words; HALVES]) -> Self::Halves;

    /// All half words `value`.
    unsafe fn halves(value: u16) -> Self::Halves;
    /// `a & b`.
    unsafe fn and_halves(a: Self::Halves, b: Self::Halves) -> Self::Halves;
    /// `a + b`.
    unsafe fn add_halves(a: Self::Halves, b: Self::Halves) -> Self::Halves;
    /// `a - b`, but 0 where `b` is larger.
    unsafe fn less(a: Self::Halves, b: Self::Halves) -> Self::Halves;
    /// `a >> BITS`, unsigned.
    unsafe fn shift_halves<const BITS: u32>(a: Self::Halves) -> Self::Halves;
    /// `a >> BITS`, signed.
    unsafe fn shift_halves_signed<const BITS: u32>(a: Self::Halves) -> Self::Halves;
    /// `a << BITS`.
    unsafe fn shift_halves_left<const BITS: u32>(a: Self::Halves) -> Self::Halves;
    /// `then` where `a & bits` is not zero, and zero elsewhere.
    unsafe fn where_some(a: Self::Halves, bits: Self::Halves, then: Self::Halves) -> Self::Halves;
    /// The least half word of each vector.
    unsafe fn least(of: [Self::Halves; 2]) -> [u16; 2];

    /// Bits of the values of a block.
    #[inline(always)]
    unsafe fn load(values: &[f32; BLOCK]) -> [Self::Words; HALVES] {
        let bits = bytemuck::cast_ref(values);
        // SAFETY: the caller upholds the contract.
        unsafe { [Self::load_bits(bits, 0), Self::load_bits(bits, LANES)] }
    }
    /// Values with the upper halves `upper`; their lower halves are zero.
    unsafe fn store_upper(upper: Self::Halves, to: &mut [f32; BLOCK]);
    /// Codes in the upper bytes of half words; the lower bytes are zero.
    unsafe fn load_codes(from: [&[u8; BLOCK]; 2]) -> [Self::Halves; 2];
    /// Stores half words below 256 as bytes.
    unsafe fn store_codes(codes: [Self::Halves; 2], to: [&mut [u8; BLOCK]; 2]);
}
