#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| superoffload_fuzz::call("carried", input));
