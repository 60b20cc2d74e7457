//! All campaigns. The identifiers are those of the table in docs/reliability.md.

use crate::harness::Campaign;
use crate::*;

pub const CAMPAIGNS: &[Campaign] = &[
    r01_kill::CAMPAIGN,
    r02_power::CAMPAIGN,
    r03_disk::CAMPAIGN,
    r03b_file_systems::CAMPAIGN,
    r04_truncation::CAMPAIGN,
    r05_flips::CAMPAIGN,
    r07_injection::CAMPAIGN,
    r08b_rollbacks::CAMPAIGN,
    r09_signals::CAMPAIGN,
    r09b_two_signals::CAMPAIGN,
    r10_memory::CAMPAIGN,
    r11_limits::CAMPAIGN,
    r13_driver::MEMORY,
    r13_driver::CALLS,
    r14_stall::CAMPAIGN,
    r14b_slow_process::CAMPAIGN,
    r15_hang::CAMPAIGN,
    r16_ranks::CAMPAIGN,
    r16b_processes::CAMPAIGN,
    r16c_unwritable::CAMPAIGN,
    r16d_wire::CAMPAIGN,
    r17_data::CAMPAIGN,
    r18_fuzz::SETTINGS,
    r18_fuzz::SETTINGS_YAML,
    r18_fuzz::SETTINGS_JSON,
    r18_fuzz::DEEPSPEED,
    r18_fuzz::CONFIG,
    r18_fuzz::WEIGHTS,
    r18_fuzz::INDEX,
    r18_fuzz::PARQUET,
    r18_fuzz::TOKENIZER,
    r18_fuzz::TEMPLATE,
    r18_fuzz::SOURCE,
    r18_fuzz::FORMAT,
    r18_fuzz::JSON,
    r18_fuzz::NORMALIZER,
    r18_fuzz::MANIFEST,
    r21_forged::CAMPAIGN,
    r22_resume::CAMPAIGN,
    r23_determinism::CAMPAIGN,
    r23b_replans::CAMPAIGN,
    r25_soak::CAMPAIGN,
    r18_fuzz::PROFILE,
    suites::RESCTRL,
    r27_starved::CAMPAIGN,
    r28_clock::CAMPAIGN,
    suites::PARITY,
    suites::REAL_WEIGHTS,
    r32_formats::CAMPAIGN,
    suites::EXPORT,
    r34_placements::CAMPAIGN,
];

/// Prints the list.
pub fn print() -> Result<(), String> {
    CAMPAIGNS.iter().for_each(|campaign| print_line(&format!("{:<6} {:>7} runs  {}", campaign.id, campaign.runs, campaign.what)));
    Ok(())
}
