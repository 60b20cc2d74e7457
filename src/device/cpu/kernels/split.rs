//! Memory in disjoint parts, one for each block of a [`Team`]'s job, so that kernels may write from many threads.

use crate::device::cpu::team::Team;
use std::marker::PhantomData;
use std::ops::Range;

/// Mutable memory divided into parts that do not overlap.
pub(crate) trait Split: Sync {
    type Part;
    fn count(&self) -> usize;
    /// Part `index`, which is below [`Split::count`].
    ///
    /// # Safety
    /// At most one part of each index may exist at a time.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

impl Team {
    /// Runs `work(block, part)` once for every part.
    pub(crate) fn for_each<S: Split>(&mut self, parts: S, work: impl Fn(usize, S::Part) + Sync) {
        // SAFETY: the team runs every block once.
        self.run(parts.count(), &|_, block| work(block, unsafe { parts.part(block) }));
    }

    /// As [`Team::for_each`], with a part of `scratch` for each thread.
    ///
    /// # Panics
    /// If `scratch` has fewer parts than the team has threads.
    pub(crate) fn for_each_with<L: Split, S: Split>(&mut self, scratch: L, parts: S, work: impl Fn(L::Part, usize, S::Part) + Sync) {
        assert!(scratch.count() >= self.threads());
        // SAFETY: the team runs every block once, and one block at a time on each thread.
        self.run(parts.count(), &|thread, block| work(unsafe { scratch.part(thread) }, block, unsafe { parts.part(block) }));
    }
}

/// A slice cut into chunks of equal length; the last may be shorter.
pub(crate) struct Chunks<'a, T> {
    start: *mut T,
    elems: usize,
    chunk: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: `Chunks` returns disjoint `&mut [T]`, which may go to other threads.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Chunks of `chunk` elements.
    pub(crate) fn new(memory: &'a mut [T], chunk: usize) -> Self {
        Self { start: memory.as_mut_ptr(), elems: memory.len(), chunk: chunk.max(1), memory: PhantomData }
    }
}

impl<'a, T: Send> Split for Chunks<'a, T> {
    type Part = &'a mut [T];
    fn count(&self) -> usize {
        self.elems.div_ceil(self.chunk)
    }
    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let start = index * self.chunk;
        assert!(start < self.elems);
        // SAFETY: the chunk is inside the slice and disjoint from the other chunks; the caller guarantees that this chunk exists once.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), self.chunk.min(self.elems - start)) }
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    type Part = (A::Part, B::Part);
    fn count(&self) -> usize {
        assert_eq!(self.0.count(), self.1.count());
        self.0.count()
    }
    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: the caller's guarantee covers both.
        unsafe { (self.0.part(index), self.1.part(index)) }
    }
}

/// A row-major matrix with a row pitch of at least its number of columns.
pub(crate) struct MatMut<'a, T> {
    start: *mut T,
    rows: usize,
    cols: usize,
    /// Elements between the beginnings of two rows.
    pitch: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: a `MatMut` is a `&mut` to its elements.
unsafe impl<T: Send> Send for MatMut<'_, T> {}

impl<'a, T> MatMut<'a, T> {
    /// A dense matrix with rows of `cols`.
    ///
    /// # Panics
    /// If `memory` does not consist of whole rows.
    pub(crate) fn new(memory: &'a mut [T], cols: usize) -> Self {
        assert!(cols > 0 && memory.len().is_multiple_of(cols), "{} elements in rows of {cols}", memory.len());
        Self { start: memory.as_mut_ptr(), rows: memory.len() / cols, cols, pitch: cols, memory: PhantomData }
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the rows lie inside the memory that this matrix borrows.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.pitch), self.cols) }
    }

    /// The columns before `at`, and the remaining columns.
    ///
    /// # Panics
    /// If there are fewer columns.
    pub(crate) fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols);
        // Wrapping addition, because a matrix without rows has no memory that the pointer could stay inside.
        let right = self.start.wrapping_add(at);
        (Self { cols: at, ..self }, Self { start: right, cols: self.cols - at, ..self })
    }

    /// Borrows a range of columns.
    ///
    /// # Panics
    /// If there are fewer columns.
    pub(crate) fn columns(&mut self, range: Range<usize>) -> MatMut<'_, T> {
        assert!(range.start <= range.end && range.end <= self.cols);
        MatMut { start: self.start.wrapping_add(range.start), cols: range.len(), memory: PhantomData, ..*self }
    }

    /// Divides the matrix into tiles of at most `rows` by `cols`, numbered along rows of tiles.
    pub(crate) fn tiles(self, rows: usize, cols: usize) -> Tiles<'a, T> {
        Tiles { matrix: self, rows: rows.max(1), cols: cols.max(1) }
    }
}

/// A matrix divided into tiles; tiles at the right and lower edges may be smaller.
pub(crate) struct Tiles<'a, T> {
    matrix: MatMut<'a, T>,
    rows: usize,
    cols: usize,
}

// SAFETY: `Tiles` returns disjoint tiles, which may go to other threads.
unsafe impl<T: Send> Sync for Tiles<'_, T> {}

impl<'a, T: Send> Split for Tiles<'a, T> {
    type Part = MatMut<'a, T>;
    fn count(&self) -> usize {
        self.matrix.rows.div_ceil(self.rows) * self.matrix.cols.div_ceil(self.cols)
    }
    unsafe fn part(&self, index: usize) -> MatMut<'a, T> {
        assert!(index < self.count());
        let across = self.matrix.cols.div_ceil(self.cols);
        let (row, col) = (index / across * self.rows, index % across * self.cols);
        // SAFETY: row and col are inside the matrix.
        let start = unsafe { self.matrix.start.add(row * self.matrix.pitch + col) };
        let (rows, cols) = (self.rows.min(self.matrix.rows - row), self.cols.min(self.matrix.cols - col));
        MatMut { start, rows, cols, pitch: self.matrix.pitch, memory: PhantomData }
    }
}

/// A row-major matrix divided into ranges of rows, and each of them into blocks of columns, which are numbered first.
pub(crate) struct Bands<'a, T> {
    matrix: MatMut<'a, T>,
    rows: &'a [Range<usize>],
    cols: usize,
}

// SAFETY: `Bands` returns disjoint parts, which may go to other threads.
unsafe impl<T: Send> Sync for Bands<'_, T> {}

impl<'a, T> Bands<'a, T> {
    /// Parts of `cols` columns in each of `rows`.
    ///
    /// # Panics
    /// If the ranges overlap, descend or exceed the matrix, or the columns are no whole blocks.
    pub(crate) fn new(matrix: MatMut<'a, T>, rows: &'a [Range<usize>], cols: usize) -> Self {
        let ends = rows.iter().try_fold(0, |end, rows| (end <= rows.start && rows.start <= rows.end).then_some(rows.end));
        assert!(ends.is_some_and(|end| end <= matrix.rows) && matrix.cols.is_multiple_of(cols));
        Self { matrix, rows, cols }
    }
}

impl<'a, T: Send> Split for Bands<'a, T> {
    type Part = MatMut<'a, T>;

    fn count(&self) -> usize {
        self.rows.len() * (self.matrix.cols / self.cols)
    }

    unsafe fn part(&self, index: usize) -> MatMut<'a, T> {
        let across = self.matrix.cols / self.cols;
        let (rows, col) = (&self.rows[index / across], index % across * self.cols);
        // SAFETY: the rows and columns are inside the matrix.
        let start = unsafe { self.matrix.start.add(rows.start * self.matrix.pitch + col) };
        MatMut { start, rows: rows.len(), cols: self.cols, pitch: self.matrix.pitch, memory: PhantomData }
    }
}
