//! Tables in the format of `expected.csv`: comment lines, a header and rows, without quoting.

/// A table of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Lines that begin with `#`, without the `#`.
    pub comments: Vec<String>,
    /// Names of the columns.
    pub header: Vec<String>,
    /// Cells. Each row is as long as the header; an empty cell has no value.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Parses a file.
    ///
    /// # Errors
    /// The number of the line and the cause: no header, a quoted cell, or a row with a wrong number of cells.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut table = Self { comments: Vec::new(), header: Vec::new(), rows: Vec::new() };
        for (index, line) in text.lines().enumerate() {
            table.push(line.trim()).map_err(|cause| format!("line {}: {cause}", index + 1))?;
        }
        if table.header.is_empty() { Err("no header".into()) } else { Ok(table) }
    }

    fn push(&mut self, line: &str) -> Result<(), String> {
        if let Some(comment) = line.strip_prefix('#') {
            self.comments.push(comment.trim().into());
            return Ok(());
        }
        if line.contains('"') {
            return Err("quoted cells are not supported".into());
        }
        let cells: Vec<_> = line.split(',').map(|cell| cell.trim().to_owned()).collect();
        match self.header.len() {
            _ if line.is_empty() => {}
            0 => self.header = cells,
            columns if columns == cells.len() => self.rows.push(cells),
            columns => return Err(format!("{} cells under {columns} columns", cells.len())),
        }
        Ok(())
    }

    /// Formats the table with aligned columns, numbers to the right. An empty cell becomes `-`.
    pub fn aligned(&self) -> String {
        let lines: Vec<&Vec<String>> = std::iter::once(&self.header).chain(&self.rows).collect();
        let columns: Vec<Column> = (0..self.header.len()).map(|index| Column::of(&self.rows, &lines, index)).collect();
        let print = |line: &&Vec<String>| {
            let cells: Vec<_> = line.iter().zip(&columns).map(|(cell, column)| column.pad(cell)).collect();
            format!("{}\n", cells.join("  ").trim_end())
        };
        lines.iter().map(print).collect()
    }
}

/// Format of a column.
struct Column {
    chars: usize,
    is_number: bool,
}

impl Column {
    fn of(rows: &[Vec<String>], lines: &[&Vec<String>], index: usize) -> Self {
        let chars = lines.iter().map(|line| line[index].chars().count()).max().unwrap_or(0);
        Self { chars, is_number: rows.iter().all(|row| row[index].is_empty() || row[index].parse::<f64>().is_ok()) }
    }

    fn pad(&self, cell: &str) -> String {
        let (cell, chars) = (if cell.is_empty() { "-" } else { cell }, self.chars);
        if self.is_number { format!("{cell:>chars$}") } else { format!("{cell:<chars$}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_and_aligns() {
        let table = Table::parse("# from somewhere\nname,tflops\nfirst,1.5\nx,\n\n").unwrap();
        assert_eq!(table.comments, ["from somewhere"]);
        assert_eq!(table.aligned(), "name   tflops\nfirst     1.5\nx           -\n");
    }

    #[test]
    fn refuses_ragged_rows_and_quotes() {
        assert_eq!(Table::parse("a,b\n1\n").unwrap_err(), "line 2: 1 cells under 2 columns");
        assert_eq!(Table::parse("a\n\"1\"\n").unwrap_err(), "line 2: quoted cells are not supported");
        assert_eq!(Table::parse("# nothing\n").unwrap_err(), "no header");
    }

    proptest! {
        #[test]
        fn never_panics(text in "([#a1,\"é]{0,6}\n?){0,6}") {
            let _ = Table::parse(&text).map(|table| table.aligned());
        }
    }
}
