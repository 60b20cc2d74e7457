//! Trained rows of a frozen token embedding and of a frozen output matrix: tensors of their own beside the frozen tables.

use super::file_rows::FileRows;
use super::{FLAT_ALIGN_ELEMS, HfPart, Module, Role, TableBuilder, TensorSpec};
use crate::model::shape::ModelShape;

/// Index of the first tensor of rows, behind those of all other tensors, which are the same with and without rows.
const ROWS_INDEX: usize = 1 << 32;

/// Blocks of the shortest flat range with rows, so that so many ranks have a block each. A few rows alone are less than one block.
const BLOCKS_MIN: usize = 64;

/// Elements of the shortest flat range of `shape`.
pub(super) fn least_elems(shape: &ModelShape) -> usize {
    if shape.trained_tokens.is_some() { BLOCKS_MIN * FLAT_ALIGN_ELEMS } else { 0 }
}

impl TensorSpec {
    /// Whether the tensor is a table with a row for each token: the token embedding or the output matrix.
    pub(in crate::model) fn has_token_rows(&self) -> bool {
        matches!(self.role, Role::Wte | Role::LmHead)
    }

    /// The first row of a frozen table of which this tensor has trained rows; `None` for all other tensors.
    pub fn first_token(&self) -> Option<usize> {
        self.files.first().and_then(|file| file.file_rows).map(|rows| rows.first)
    }
}

impl TableBuilder<'_> {
    /// A table with a row for each token, followed by its trained rows if the table is frozen but for a range of tokens.
    pub(super) fn table(&mut self, module: Module, [role, rows]: [Role; 2], [vocab, channels]: [usize; 2], name: String) {
        self.whole(module, role, vec![vocab, channels], self.matrix_init(), name.clone());
        if let Some(tokens) = &self.shape.trained_tokens {
            let file_rows = Some(FileRows { first: tokens.start, all: vocab });
            let part = HfPart { file_rows, ..HfPart::plain(name, 0, tokens.len()) };
            self.push(module, rows, vec![tokens.len(), channels], self.matrix_init(), vec![part]);
            if let Some(spec) = self.specs.last_mut() {
                spec.index = ROWS_INDEX + self.row_tensors;
            }
            self.row_tensors += 1;
        }
    }
}
