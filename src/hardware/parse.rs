//! Parsers for the notations of `/proc` and `/sys`. They return `None` for malformed text.

/// Parses a size in bytes: `32768K`, `1M`, `512`.
pub(crate) fn size_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Parses the number after `key:` in bytes, as in `MemTotal: 24684092 kB` or `Node 0 MemTotal: 1024 kB`.
pub(crate) fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.split_whitespace().last() == Some(key)).then_some(value)
    })?;
    match value.split_whitespace().collect::<Vec<_>>()[..] {
        [kib, "kB"] => kib.parse::<u64>().ok()?.checked_mul(1024),
        _ => None,
    }
}

/// The value of `key` in lines `key : value`.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then_some(value.trim())
    })
}

/// Parses cgroup v2's `cpu.max` in units of one CPU: `150000 100000` is 1.5, `max 100000` is unlimited.
pub(crate) fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota_cpus(quota, period)
}

/// CPU time in units of one CPU, from a quota and a period in microseconds. cgroup v1 writes -1 for unlimited.
pub(crate) fn quota_cpus(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// Parses a memory limit in bytes. Unlimited is `max` in cgroup v2 and nearly `i64::MAX` in v1.
pub(crate) fn memory_max(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes| bytes < i64::MAX as u64 / 2)
}

/// Parses the choice in brackets: `madvise` of `always [madvise] never`.
pub(crate) fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(choice, _)| choice)
}

/// The value of `tag` in the kernel's auxiliary vector, which consists of pairs of native words.
pub(crate) fn auxv(bytes: &[u8], tag: usize) -> Option<usize> {
    const WORD: usize = size_of::<usize>();
    let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).ok();
    let pairs = bytes.chunks_exact(2 * WORD).map(|pair| (word(&pair[..WORD]), word(&pair[WORD..])));
    pairs.into_iter().find(|pair| pair.0 == Some(tag))?.1
}

/// The first token that looks like a version: `570.124.06` in the text of the NVIDIA driver.
pub(crate) fn version(text: &str) -> Option<&str> {
    let is_version =
        |token: &&str| token.contains('.') && token.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    text.split_whitespace().find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes() {
        assert_eq!(size_bytes("32768K\n"), Some(32 << 20));
        assert_eq!(size_bytes("114M"), Some(114 << 20));
        assert_eq!(size_bytes("512"), Some(512));
        for bad in ["", "K", "-1K", "1.5M", "18446744073709551615G", "1Kä"] {
            assert_eq!(size_bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn memory() {
        let text = "MemTotal:       24684092 kB\nHugePages_Total:       7\nNode 0 MemFree: 3 kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), Some(24_684_092 * 1024));
        assert_eq!(meminfo_bytes(text, "MemFree"), Some(3072));
        assert_eq!(meminfo_bytes(text, "HugePages_Total"), None);
        assert_eq!(meminfo_bytes("MemTotal: 99999999999999999999 kB", "MemTotal"), None);
    }

    #[test]
    fn limits() {
        assert_eq!(cpu_max("150000 100000\n"), Some(1.5));
        for unlimited in ["max 100000", "", "100000", "0 100000", "100000 0"] {
            assert_eq!(cpu_max(unlimited), None, "{unlimited}");
        }
        assert_eq!(quota_cpus("-1\n", "100000\n"), None);
        assert_eq!(memory_max("1073741824\n"), Some(1 << 30));
        assert_eq!(memory_max("max\n"), None);
        assert_eq!(memory_max("9223372036854771712\n"), None);
    }

    #[test]
    fn choices_versions_and_the_auxiliary_vector() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always"), None);
        assert_eq!(version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"), Some("570.124.06"));
        let vector: Vec<u8> = [33usize, 1, 6, 65536, 0, 0].into_iter().flat_map(usize::to_ne_bytes).collect();
        assert_eq!(auxv(&vector, 6), Some(65536));
        assert_eq!(auxv(&vector[..24], 6), None);
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "\\PC{0,40}", key in "[a-z]{0,3}") {
            let _ = (size_bytes(&text), meminfo_bytes(&text, &key), field(&text, &key), cpu_max(&text));
            let _ = (quota_cpus(&text, &text), memory_max(&text), chosen(&text), version(&text), auxv(text.as_bytes(), 6));
        }

        #[test]
        fn sizes_scale(number in 0u64..1 << 30) {
            prop_assert_eq!(size_bytes(&format!("{number}K")), Some(number * 1024));
            prop_assert_eq!(meminfo_bytes(&format!("A: {number} kB"), "A"), Some(number * 1024));
        }
    }
}
