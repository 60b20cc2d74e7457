//! Types for quantities that must not be mixed up, and the format of sizes and dates.

use std::fmt;
use std::str::FromStr;

/// Sum of squares of a gradient. Not a norm: see [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct NormSq(pub f64);

/// Euclidean norm of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Norm(pub f64);

impl NormSq {
    /// The square root, divided by the loss scale, which multiplied every gradient.
    pub fn norm(self, inv_loss_scale: f32) -> Norm {
        Norm(self.0.sqrt() * f64::from(inv_loss_scale))
    }
}

/// Factor on every gradient of a step, at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipScale(pub f32);

impl Norm {
    /// `torch.nn.utils.clip_grad_norm_`'s factor: `max_norm / (norm + 1e-6)`, at most 1; `None` when it changes nothing.
    pub(crate) fn clip_scale(self, max_norm: f64) -> Option<ClipScale> {
        let scale = max_norm / (self.0 + 1e-6);
        (scale < 1.0).then_some(ClipScale(scale as f32))
    }
}

/// `value` as text; numbers with too many digits are printed like `1e300`.
pub(crate) fn compact(value: impl fmt::Display) -> String {
    let text = value.to_string();
    match text.parse::<f64>() {
        Ok(number) if text.len() > DIGITS_MAX && number.is_finite() => format!("{number:e}"),
        _ => text,
    }
}

/// Number of digits of a 64-bit integer.
const DIGITS_MAX: usize = 20;

/// A count in human-readable form: `8.030 B`, `3.6 M`, `16.4 k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count(pub usize);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 as f64 {
            x if x >= 1e9 => write!(f, "{:.3} B", x / 1e9),
            x if x >= 1e6 => write!(f, "{:.1} M", x / 1e6),
            x if x >= 1e3 => write!(f, "{:.1} k", x / 1e3),
            x => write!(f, "{x}"),
        }
    }
}

/// `number` and its `noun`, in the plural unless the number is 1: `1 thread`, `2 threads`, `2 passes`.
pub(crate) fn counted<N: PartialEq + From<u8> + fmt::Display>(number: N, noun: &str) -> String {
    let end = match number == N::from(1) {
        true => "",
        false if noun.ends_with('s') || noun.ends_with("ch") => "es",
        false => "s",
    };
    format!("{number} {noun}{end}")
}

/// A byte count. Prints with a binary unit, reads `80GiB`, `1.5 TiB`, `900MiB` or a plain number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Bytes(pub u64);

/// Each unit is 1024 times the one before.
const BYTE_UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

impl Bytes {
    /// Both sizes in human-readable form. If they differ but would be printed alike, the exact bytes are added.
    pub(crate) fn apart(sizes: [u64; 2]) -> [String; 2] {
        let words = sizes.map(|bytes| Self(bytes).to_string());
        let is_alike = sizes[0] != sizes[1] && words[0] == words[1];
        if is_alike { sizes.map(|bytes| format!("{} ({bytes} bytes)", Self(bytes))) } else { words }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < BYTE_UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", BYTE_UNITS[unit]) }
    }
}

impl FromStr for Bytes {
    type Err = String;

    /// Parses a decimal number with a binary unit; a fraction of a byte is dropped. GB is refused, because it may be meant as GiB.
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("expected a size such as 80GiB, 1.5TiB or a number of bytes, not `{}`", text.escape_debug());
        let digits = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = text.trim()[digits.len()..].trim();
        let power = if unit.is_empty() { 0 } else { BYTE_UNITS.iter().position(|known| *known == unit).ok_or_else(refuse)? };
        let number: f64 = digits.trim_end().parse().map_err(|_| refuse())?;
        let bytes = number * 1024f64.powi(power as i32);
        // `u64::MAX` as a float is rounded up by one.
        if (0.0..u64::MAX as f64).contains(&bytes) { Ok(Self(bytes as u64)) } else { Err(refuse()) }
    }
}

/// The date `days` days after 1970-01-01, in the Gregorian calendar.
pub(crate) fn date(mut days: u64) -> String {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, days + 1)
}

/// The time `seconds` seconds after 1970-01-01 00:00, in UTC.
pub(crate) fn date_and_time(seconds: u64) -> String {
    let (day, second) = (date(seconds / 86_400), seconds % 86_400);
    format!("{day} {:02}:{:02}:{:02} UTC", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn clipping_is_torchs_and_never_enlarges() {
        assert_eq!(Norm(0.5).clip_scale(1.0), None);
        assert_eq!(Norm(4.0).clip_scale(1.0), Some(ClipScale((1.0 / 4.000001) as f32)));
        // Just under the threshold torch's epsilon still clips: 1 / (1 + 1e-6) < 1.
        assert!(Norm(1.0).clip_scale(1.0).is_some());
        assert_eq!(NormSq(9.0).norm(0.5), Norm(1.5));
    }

    #[test]
    fn one_of_a_kind_is_singular() {
        assert_eq!([0usize, 1, 2].map(|number| counted(number, "thread")), ["0 threads", "1 thread", "2 threads"]);
        assert_eq!([1u64, 3].map(|number| counted(number, "pass")), ["1 pass", "3 passes"]);
        assert_eq!([1u64, 3].map(|number| counted(number, "micro-batch")), ["1 micro-batch", "3 micro-batches"]);
    }

    #[test]
    fn bytes_print_with_one_decimal() {
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(Bytes(3 << 20).to_string(), "3.0 MiB");
    }

    #[test]
    fn sizes_read_as_people_write_them() {
        let cases = [("80GiB", 80 << 30), ("1.5TiB", 3 << 39), ("900 MiB", 900 << 20), (" 17 ", 17), ("0.5KiB", 512), ("3B", 3)];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "GiB", "80GB", "80gib", "-1GiB", "inf", "nanB", "1e3GiBs", "80GiBGiB", "20000000TiB"] {
            let refused = text.parse::<Bytes>().unwrap_err();
            assert!(refused.contains("80GiB") && refused.contains(text), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn whole_sizes_survive_in_every_unit(n in 0u64..1 << 20, unit in 0..BYTE_UNITS.len(), space in " ?") {
            let text = format!("{n}{space}{}", BYTE_UNITS[unit]);
            prop_assert_eq!(text.parse(), Ok(Bytes(n << (10 * unit))));
        }

        #[test]
        fn printed_sizes_read_back_to_a_twentieth_of_their_unit(n in 0u64..1 << 60) {
            let Bytes(back) = Bytes(n).to_string().parse().unwrap();
            let unit = (0..BYTE_UNITS.len()).map(|i| 1u64 << (10 * i)).rfind(|&unit| unit <= n).unwrap_or(1);
            prop_assert!(back.abs_diff(n) as f64 <= 0.0501 * unit as f64, "{n} -> {back}");
        }

        #[test]
        fn no_text_panics(text in "\\PC*|[0-9.eE+-]{0,8} ?[a-zA-Z]{0,4}") {
            let _ = text.parse::<Bytes>();
        }
    }

    #[test]
    fn days_have_dates() {
        for (days, expected) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_514, "2026-03-02"), (20_778, "2026-11-21")]
        {
            assert_eq!(date(days), expected, "{days}");
        }
        assert_eq!(date_and_time(20_778 * 86_400 + 3661), "2026-11-21 01:01:01 UTC");
    }
}
