//! Output of a run's completed calls. Machines may be available only for minutes, while sweeps take longer, so a later run continues from
//! it.

use crate::config::{Flags, Program};
use crate::error::{Error, Result};
use crate::lines;
use serde_json::{Value, json};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Completed calls, each a line of a file that exists until the run is complete.
pub struct Unfinished {
    path: PathBuf,
    calls: Vec<Value>,
}

impl Unfinished {
    /// Opens the file with the completed calls of an interrupted run, if any.
    ///
    /// # Errors
    /// Errors of reading the file.
    pub fn open(path: PathBuf) -> Result<Self> {
        Ok(Self { calls: lines::read(&path)?.to_vec(), path })
    }

    /// Output of a completed call.
    pub fn find(&self, program: Program, flags: &Flags) -> Option<Vec<Value>> {
        let wanted = entry(program, flags, &[]);
        let found = self.calls.iter().find(|call| call["program"] == wanted["program"] && call["flags"] == wanted["flags"])?;
        found["lines"].as_array().cloned()
    }

    /// Stores the output of a call.
    ///
    /// # Errors
    /// Errors of writing the file.
    pub fn add(&mut self, program: Program, flags: &Flags, lines: &[Value]) -> Result<()> {
        self.calls.push(entry(program, flags, lines));
        lines::write(&self.path, &self.calls, false)
    }

    /// Removes the file after all lines were written to their final files.
    ///
    /// # Errors
    /// Errors of removing the file.
    pub fn end(self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(Error::Io { path: self.path, source }),
            _ => Ok(()),
        }
    }
}

fn entry(program: Program, flags: &Flags, lines: &[Value]) -> Value {
    json!({"program": format!("{program:?}"), "flags": flags, "lines": lines})
}
