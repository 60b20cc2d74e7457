//! Integration tests that need no GPU, in one binary. See each module for what it proves.

mod exactness;
mod parity;
mod style;
mod support;
