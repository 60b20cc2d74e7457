//! Rows of a file that alternate by head.

/// Rows that alternate in a file by head: each head has one segment of every kind. The table has all segments of the last kind, which are
/// gates, then all segments of the first kind, of the second kind and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interleaved {
    /// Rows of a head by kind, in the order of the file; 0 for kinds that do not exist.
    segments: [usize; 4],
}

impl Interleaved {
    /// # Panics
    /// If there are no kinds, or more than four.
    pub(super) fn new(kinds: &[usize]) -> Self {
        let mut segments = [0; 4];
        segments[4 - kinds.len()..].copy_from_slice(kinds);
        Self { segments }
    }

    pub(super) fn head_rows(self) -> usize {
        self.segments.iter().sum()
    }

    /// Runs of neighbouring rows of a file with `rows` rows: first row in the file, first row in the table, length.
    pub(crate) fn runs(self, rows: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let heads = (0..rows).step_by(self.head_rows());
        heads.flat_map(move |head| {
            let mut row = head;
            self.segments.into_iter().filter(|len| *len > 0).map(move |len| {
                row += len;
                (row - len, self.table_row(row - len, rows), len)
            })
        })
    }

    /// Row in the table of row `row` of a file with `rows` rows.
    pub(super) fn table_row(self, row: usize, rows: usize) -> usize {
        let (head_rows, [first, second, third, last]) = (self.head_rows(), self.segments);
        let (heads, head, within) = (rows / head_rows, row / head_rows, row % head_rows);
        let ends = [first, first + second, first + second + third, head_rows];
        let kind = ends.iter().position(|&end| within < end).expect("a row of the head");
        let (len, before) = (self.segments[kind], [last, last + first, last + first + second, 0][kind]);
        before * heads + head * len + within - (ends[kind] - len)
    }

    /// Rows of gates in a file with `rows` rows.
    pub(super) fn gate_rows(self, rows: usize) -> usize {
        rows / self.head_rows() * self.segments[3]
    }
}
