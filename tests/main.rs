//! Integration tests that need no GPU, in one binary. The documentation of each module states what it proves.

mod aliases;
mod bad_records;
mod batch;
mod campaign;
mod chat;
mod cli;
mod convert_config;
mod data;
mod data_view;
mod delta;
mod deploy;
mod distill;
mod documented;
mod evaluation;
mod exactness;
mod examples;
mod export_golden;
mod export_trained;
#[cfg(feature = "cuda")]
mod fake_gpus;
mod faults;
mod file_systems;
mod fine_tuning;
mod foreign_files;
mod fp8;
mod frozen;
mod fuzz_corpus;
mod going_on;
mod guide;
mod head_rows;
mod hub;
#[cfg(feature = "hub")]
#[expect(dead_code, reason = "shared with the tests beside the code")]
mod hub_server;
mod late_processes;
mod logits_dtype;
mod memory;
mod moments;
mod newcomer;
mod packing;
mod parity;
#[cfg(feature = "parquet")]
mod parquet;
mod plan_memory;
#[path = "gpu/planned.rs"]
mod planned;
mod preference;
mod processes;
mod processes_saves;
mod program;
mod python;
mod ranks;
mod ranks_mutants;
mod readme;
mod real_model;
mod records;
mod replan;
mod report;
mod resume;
mod resume_compare;
mod rollouts;
mod run_dir;
mod sample;
mod segments;
mod selftest;
mod sequences;
mod signals;
mod style;
mod support;
#[path = "../src/sweep.rs"]
mod sweep;
mod tensorboard;
mod terminal;
mod text_parts;
mod tokenizers;
mod tokens_per_step;
mod train_tokens;
mod trl;
mod weights;
mod wire;
mod wire_proxy;
