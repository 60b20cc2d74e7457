//! `strftime_now` of chat templates, for a day that the run has chosen: text must not change with the clock.

/// A day of the Gregorian calendar, from 1970 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) struct Day {
    /// Days after 1970-01-01.
    days: u64,
    year: u64,
    month: usize,
    day: u64,
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

fn days_of_month(year: u64, month: usize) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    [31, 28 + u64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month]
}

impl Day {
    /// The day `days` after 1970-01-01.
    fn after_1970(days: u64) -> Self {
        let (mut year, mut month, mut left) = (1970, 0, days);
        while left >= days_of_month(year, month) {
            left -= days_of_month(year, month);
            (year, month) = if month == 11 { (year + 1, 0) } else { (year, month + 1) };
        }
        Self { days, year, month, day: left + 1 }
    }

    /// Today, in UTC.
    pub(in crate::data) fn today() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self::after_1970(since.as_secs() / 86400)
    }

    /// The day that `text` names as `YYYY-MM-DD`, until the year 9999.
    pub(in crate::data) fn parse(text: &str) -> Option<Self> {
        let parts: Vec<u64> = text.split('-').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        let [year @ 1970..=9999, month @ 1..=12, day] = parts[..] else { return None };
        let earlier =
            (1970..year).flat_map(|year| (0..12).map(move |month| (year, month))).chain((0..month as usize - 1).map(|m| (year, m)));
        let days: u64 = earlier.map(|(year, month)| days_of_month(year, month)).sum();
        (1..=days_of_month(year, month as usize - 1)).contains(&day).then(|| Self::after_1970(days + day - 1))
    }

    /// As Python's `strftime` at midnight in the C locale; `None` for a directive that has no place in a date.
    pub(super) fn format(self, format: &str) -> Option<String> {
        let (month, weekday) = (MONTHS[self.month], WEEKDAYS[(self.days % 7) as usize]);
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let directive = chars.next()?;
            out.push_str(&match directive {
                'Y' => self.year.to_string(),
                'y' => format!("{:02}", self.year % 100),
                'm' => format!("{:02}", self.month + 1),
                'd' => format!("{:02}", self.day),
                'B' => month.into(),
                'b' | 'h' => month[..3].into(),
                'A' => weekday.into(),
                'a' => weekday[..3].into(),
                'H' | 'M' | 'S' => "00".into(),
                '%' => "%".into(),
                '-' => match chars.next()? {
                    'd' => self.day.to_string(),
                    'm' => (self.month + 1).to_string(),
                    _ => return None,
                },
                _ => return None,
            });
        }
        Some(out)
    }
}

impl std::fmt::Display for Day {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month + 1, self.day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (text, shown) in [
            ("1970-01-01", "Thu, 01 January 70"),
            ("2000-02-29", "Tue, 29 February 00"),
            ("2026-11-23", "Mon, 23 November 26"),
            ("2100-03-01", "Mon, 01 March 00"),
        ] {
            let day = Day::parse(text).unwrap();
            assert_eq!((day.format("%a, %d %B %y").unwrap(), day.to_string()), (shown.to_string(), text.to_string()));
        }
        for wrong in ["", "2026", "2026-13-01", "2026-02-29", "1969-01-01", "2026-01-00", "10000-01-01", "2026-01-01-01", "x-y-z"] {
            assert_eq!(Day::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Day::parse("2026-11-03").unwrap().format("%-d %b %Y %% %H:%M"), Some("3 Nov 2026 % 00:00".into()));
        assert_eq!(Day::today().format("%Q"), None);
    }
}
