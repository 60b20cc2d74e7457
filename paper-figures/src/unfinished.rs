//! What the calls of a run have printed so far: a machine may be lent for minutes, and its sweeps take longer.

use crate::config::Program;
use crate::error::{Error, Result};
use crate::lines;
use crate::program::Flags;
use serde_json::{Value, json};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Calls that are done, each a line of a file that lasts as long as the run.
pub struct Unfinished {
    path: PathBuf,
    calls: Vec<Value>,
}

impl Unfinished {
    /// With the calls of a run that ended early, if `path` has some.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn open(path: PathBuf) -> Result<Self> {
        Ok(Self { calls: lines::read(&path)?, path })
    }

    /// What this call printed before.
    pub fn find(&self, program: Program, flags: &Flags) -> Option<Vec<Value>> {
        let wanted = entry(program, flags, &[]);
        let found = self.calls.iter().find(|call| call["program"] == wanted["program"] && call["flags"] == wanted["flags"])?;
        found["lines"].as_array().cloned()
    }

    /// Keeps what a call printed.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&mut self, program: Program, flags: &Flags, lines: &[Value]) -> Result<()> {
        self.calls.push(entry(program, flags, lines));
        lines::write(&self.path, &self.calls, false)
    }

    /// Every line is where it belongs.
    ///
    /// # Errors
    /// When the file cannot be removed.
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
