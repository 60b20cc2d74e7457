//! R11: process limits on locked memory, address space, data, open files and file size.

use crate::harness::*;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Instant;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R11",
    what: "limits on locked memory, address space, data, files and file size, from tight to wide: it is done with the same digest, or \
           refused with one line; no abort, no signal",
    runs: 60,
    smoke: 1,
    start,
};

/// Flags of `ulimit`, and values in its units.
const LIMITS: [(&str, [u64; 6]); 5] = [
    ("-l", [0, 16, 64, 1024, 8192, 65536]),
    ("-v", [40_000, 60_000, 100_000, 150_000, 250_000, 500_000]),
    ("-d", [4_000, 10_000, 20_000, 40_000, 80_000, 200_000]),
    ("-n", [4, 6, 9, 14, 20, 64]),
    ("-f", [0, 1, 8, 64, 160, 1000]),
];

/// Runs the command with its output in pipes, because a limit on file sizes would truncate output in files.
fn piped(command: &mut Command) -> Result<Outcome, String> {
    let begin = Instant::now();
    let output = command.output().map_err(|e| e.to_string())?;
    let code = output.status.code().unwrap_or_else(|| -output.status.signal().unwrap_or(0));
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(Outcome { code, hung: false, stdout, stderr, seconds: begin.elapsed().as_secs_f64() })
}

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    Ok(Box::new(move |harness, turn| {
        let (flag, values) = LIMITS[turn.index as usize % 5];
        let value = values[turn.index as usize / 5 % 6];
        turn.kind = format!("ulimit {flag} {value}");
        harness.remove("limited");
        let train = harness.train("limited", &[]);
        let mut limited = Command::new("sh");
        // Core dumps are not needed.
        limited.args(["-c", "ulimit -c 0; ulimit \"$0\" \"$1\" && shift && exec \"$@\"", flag, &value.to_string()]);
        limited.arg(train.get_program()).args(train.get_args());
        let outcome = piped(&mut limited)?;
        if outcome.code == 127 {
            // With a very tight limit the loader itself fails.
            turn.kind += ", not started";
            return Ok(());
        }
        outcome.expect_orderly(&[0, 1, 2])?;
        if outcome.code == 0 { outcome.expect_digest(&digest) } else { harness.run(harness.resume("limited", &[])).expect_digest(&digest) }
    }))
}
