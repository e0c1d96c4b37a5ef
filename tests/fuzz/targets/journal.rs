#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kvsluice_fuzz::journal(data));
