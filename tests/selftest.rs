//! The conformance suite of devices in the program: each case runs on the CPU device with settings that differ from the reference.

use crate::program::{program, run};

/// Checks that every case selected by `choice` passes on the CPU device.
fn conforms(choice: &[&str]) {
    let done = run(program(&["selftest", "--device", "cpu"]).args(choice));
    assert!(done.code == 0 && done.stdout.contains(" passed, 0 failed"), "{choice:?}: {}{}", done.stdout, done.stderr);
}

#[test]
fn kernels_compute_what_the_reference_does() {
    conforms(&["kernels/"]);
}

#[test]
fn what_is_said_of_a_gpu_is_spelled_as_settings_are() {
    conforms(&["--cuda-libraries", "/opt/nvidia", "--attention", "plain", "--expert-products", "own", "kernels/alloc"]);
}

#[test]
fn trainings_on_one_device_and_several_and_what_fails_there_conform() {
    conforms(&["--skip", "kernels/"]);
}
