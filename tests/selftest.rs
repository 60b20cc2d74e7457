//! The conformance suite of devices in the program: each case runs on the CPU device with settings that differ from the reference.

use crate::program::{program, run};

/// Checks that every case selected by `choice` passes on the CPU device.
fn conforms(choice: &[&str]) {
    let done = run(program(&["selftest", "--device", "cpu"]).args(choice));
    assert!(done.code == 0 && done.stdout.contains(" passed, 0 failed"), "{choice:?}: {}{}", done.stdout, done.stderr);
}

/// Without `SUPEROFFLOAD_SWEEP=all`, no cases of float16: the CPU device computes them as those of bfloat16 but for the conversions, which have
/// tests beside their code.
#[test]
fn kernels_match_the_reference() {
    conforms(crate::sweep::sweep(&["kernels/", "--skip", " float16"], &["kernels/"]));
}

#[test]
fn facts_of_a_gpu_are_spelled_as_settings() {
    conforms(&["--cuda-libraries", "/opt/nvidia", "--attention", "plain", "--expert-products", "own", "kernels/alloc"]);
}

#[test]
fn runs_on_one_device_and_several_and_their_failures_conform() {
    conforms(&["--skip", "kernels/"]);
}
